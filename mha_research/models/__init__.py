"""Models built around the attention modules."""

from mha_research.models.decoder import DecoderLM
from mha_research.models.model import Model
from mha_research.models.retrieval import SlotRetrieval
from mha_research.models.sample import sample

__all__ = ["DecoderLM", "Model", "SlotRetrieval", "sample"]
