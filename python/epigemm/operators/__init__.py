"""`torch.ops.epigemm.*`: implementation, fake kernels, derivatives and vmap rules; and what compiled graphs call.

Imports: `epilogues`, `arguments`, `planning`, `packs`, `calls`, `autograd`. Taken by `route`, `decorated`,
`user_epilogue`, `formula_functions`, `explain`, `fusion`.
"""
