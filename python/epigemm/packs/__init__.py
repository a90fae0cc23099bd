"""Weights in fp16 slices, kept between calls: the *packs* of fp32 products on tensor cores.

A product on fp16 slices needs both operands split. That of x is made at every call. That of a weight may be
kept: modules of `epigemm.nn` (for an `nn.Parameter`: other weights may be made for one call) and `PackedWeight`
keep it, and so do calls on a plain `nn.Parameter` under `epigemm.keep_packs()`. Any other call on a plain weight uses a
kept one that is current, and otherwise splits the weight for this call alone.

A pack belongs to a weight by the identity of the tensor object, dies with it, and is made again when the weight
has changed: into the same memory, unless the weight's memory is another now and nobody made the pack on purpose.
Changes are seen by torch's version counter, by the storage that the weight stands in, and by the steps of torch's
optimisers (fused ones do not count versions). A write that none of these sees (through `weight.data`, by a
replayed CUDA graph, by a collective) needs `repack()`.

While a gradient of the weight is asked for, no pack is kept or used: the weight is about to change. Under CUDA graph
capture a call uses a kept pack only if it was made on purpose, by `pack` or `repack()`: the graph is then
frozen to it. Otherwise the graph splits the weight itself, at every replay.

Imports: `epilogues`, `arguments`, `planning`. Taken by everybody who runs, records or explains a call.
"""
