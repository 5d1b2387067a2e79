"""Name in a config -> class of the model. A new model is its file, and one line here."""

MODELS = {
    "auto": None,
    "decoder": "mha_research.models.decoder:DecoderLM",
    "slot_retrieval": "mha_research.models.retrieval:SlotRetrieval",
}
