"""`spec.precision`: the number formats of trainer, wire, engine and KV cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from fp8rl_operator.spec.base import Model

FOUR_BITS = ("nvfp4", "mxfp4", "fp4", "int4", "w4a16", "awq", "gptq", "nf4", "bnb4")


def refuse_four_bits(value: object) -> object:
    """Refuse 4-bit formats by name, with the reason; anything else unchanged.

    Raises:
        PydanticCustomError: the value names a 4-bit format.
    """
    if isinstance(value, str) and value.lower().replace("-", "").replace("_", "") in FOUR_BITS:
        raise PydanticCustomError(
            "four_bits",
            "is a 4-bit format: 16 codes (E4M3 has 256) move the policy further from the trainer's than the mismatch"
            " limits allow, and no trainer recipe computes with the same codes",
            {"remedy": "use blockwise, mxfp8 or channel (8 bits), or bf16"},
        )
    return value


Recipe = Annotated[Literal["auto", "blockwise", "mxfp8", "bf16"], BeforeValidator(refuse_four_bits)]
Wire = Annotated[Literal["auto", "blockwise", "mxfp8", "channel", "bf16"], BeforeValidator(refuse_four_bits)]
LayerPattern = Annotated[str, Field(min_length=1, max_length=256)]


class Precision(Model):
    """Number formats. What `auto` became stands in status.precision."""

    recipe: Recipe = Field(
        "auto",
        description="Format that the trainer computes its linear layers in. auto: blockwise on compute capability 9.x,"
        " mxfp8 on 10.x, bf16 without a GPU; decided by each trainer rank from the card that it really runs on.",
    )
    wire: Wire = Field(
        "auto",
        description="Format that weights travel in and that engines serve. auto: follows the resolved recipe. channel is"
        " one scale per output row (compressed-tensors) and matches no recipe, so it needs allowMismatch.",
    )
    quantize_at: Literal["trainer", "engine"] = Field(
        "trainer",
        description="Who quantizes. trainer: the wire carries FP8 codes and scales. engine: the wire carries BF16 and"
        " vLLM quantizes on arrival to the format that wire names.",
    )
    scale_format: Literal["auto", "fp32", "pow2"] = Field(
        "auto",
        description="Scales of blockwise FP8: fp32, or rounded up to a power of two. auto: pow2 where both sides can."
        " Equal on both sides always.",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="Rounding of weights to FP8. stochastic: to the far neighbour with probability equal to the distance,"
        " with the same bits on trainer and wire (keyed by seed, version, tensor and index).",
    )
    scope: Literal["linear", "ffn"] = Field(
        "linear",
        description="Which layers are quantized, on both sides. linear: all linear layers but embeddings, head and"
        " routers. ffn: dense FFN or routed experts only.",
    )
    ignored_layers: tuple[LayerPattern, ...] = Field(
        (),
        max_length=128,
        description="Layers that stay BF16 on both sides. A pattern is a run of dotted parts of a module's name in the"
        " checkpoint, with * and ? within one part, or re: and an expression for the whole name. Anchored: mlp.gate does not"
        " match mlp.gate_up_proj. All shards of a fused layer or none (q_proj, k_proj, v_proj; gate_proj, up_proj).",
    )
    allow_mismatch: bool = Field(
        default=False,
        description="Let recipe and wire, or the quantized layers of both sides, differ. The mismatch of the"
        " log-probabilities grows accordingly.",
    )
    fp8_param: bool = Field(
        default=False,
        description="Keep the trainer's parameters themselves in FP8 (Transformer Engine fp8 primary weights)."
        " Blockwise only.",
    )
    kv_cache: Literal["bf16", "fp8"] = Field(
        "bf16", description="Format of the engines' KV cache. fp8 uses scales of 1.0, restored after every weight sync."
    )
    first_last_layers_bf16: int = Field(
        0,
        ge=0,
        le=64,
        alias="firstLastLayersBF16",
        description="How many transformer layers at each end stay BF16, on both sides. Unit: layers.",
    )
