"""The path that one weight takes from the trainer to the engine, in the order of the modules.

    offer    what will be sent, said before a byte is cast: names, shapes, dtypes, buckets, offsets; digests in the seal behind
    gather   the trainer's parameters as the checkpoint's tensors, in a fixed order, without a copy
    cast     BF16 to codes and scales (blockwise, mxfp8, channel, bf16), nearest or stochastic: the reference of all fast paths
    bucket   which byte of which bucket each part takes
    wire     buckets of bytes from the trainer to all engine ranks of an epoch
    load     into a shadow of the engine's parameters, checked against the seal, then committed in one turn

Beside the path: `kernels` (casts, digests and copies of a whole model in a few launches, bit for bit the references'), `digest` (of the wire's bytes, the same wherever they land) and `specs` (what a family's tensors are, which
are quantized, and the same in the engine's words).

What always holds:
- The source of a cast is the BF16 weight that the trainer computes with; trainer and engine compute with the same codes.
- The same weights give the same bytes: order, layout, codes, scales and random bits follow from config, plan and version.
- A weight that is not finite is never sent; a byte that is not as sealed is never committed.
- What the engine holds as one layer has one precision; what no kernel takes stays in BF16 and says why.
- Every record names its job, epoch and sync; those of others are refused.

`bucket`, `offer`, `digest` and `specs` decide and import no torch. Left out: delta and LoRA updates, 4-bit formats, weights that
are resharded on the sender's side (a piece is described by `slice`, and its digest adds up; one sender suffices here).
"""
