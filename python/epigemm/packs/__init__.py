"""Weights in fp16 slices, kept between calls: the *packs* of fp32 products on tensor cores.

For a product on fp16 slices both operands are split. x is split at every call. The slices of a weight may be kept.
Modules of `epigemm.nn` keep them for an `nn.Parameter` (another weight may be made for one call). So do `PackedWeight`,
and calls on a plain `nn.Parameter` under `epigemm.keep_packs()`. Any other call uses kept slices if they are current,
and otherwise splits the weight for this call alone.

A pack belongs to a tensor object, and is freed with it. It is made again when the weight has changed. Its memory stays
the same, unless the weight's memory has changed and the pack was not made by `pack` or `repack()`. Changes are noticed
by torch's version counter, by the weight's storage, and by the steps of torch's optimisers (fused ones do not increase
the counter). After other writes (through `weight.data`, by a replayed CUDA graph, by a collective) `repack()` is
needed.

While a gradient of the weight is needed, no pack is kept or used, because the weight is about to change. Under CUDA
graph capture a call uses a kept pack only if it is *frozen*, which means made by `pack` or `repack()`: the graph then
reads it at every replay. Otherwise the graph splits the weight, at every replay.

Imports: `epilogues`, `arguments`, `planner`. Taken by everybody who runs, records or explains a call.
"""
