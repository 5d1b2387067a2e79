"""Name in a config -> class or function. A new kind of attention or of position is its file, and one line here."""

KINDS = {
    "multi_head": "mha_research.attention.multi_head:MultiHeadAttention",
    "talking_heads": "mha_research.attention.variants.talking_heads:TalkingHeadsAttention",
    "sigmoid": "mha_research.attention.variants.sigmoid:SigmoidAttention",
    "shaw": "mha_research.attention.variants.shaw:ShawAttention",
    "differential": "mha_research.attention.variants.differential:DifferentialAttention",
    "collaborative": "mha_research.attention.variants.collaborative:CollaborativeAttention",
    "performer": "mha_research.attention.variants.performer:PerformerAttention",
    "conv_value": "mha_research.attention.variants.conv_value:ConvValueAttention",
    "frame_difference": "mha_research.attention.variants.frame_difference:FrameDifferenceAttention",
    "multi_scale": "mha_research.attention.variants.multi_scale:MultiScaleAttention",
}

POSITIONS = {
    "none": None,
    "rotary": "mha_research.attention.positions.schemes:Rotary",
    "alibi": "mha_research.attention.positions.schemes:Alibi",
    "relative": "mha_research.attention.positions.schemes:RelativeBias",
}

INITIALIZERS = {
    "xavier_uniform": "mha_research.attention.initializers:xavier_uniform",
    "orthogonal": "mha_research.attention.initializers:orthogonal",
    "identity": "mha_research.attention.initializers:identity",
    "svd_decay": "mha_research.attention.initializers:svd_decay",
}
