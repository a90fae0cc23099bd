"""`torch.ops.epigemm.*`: implementation, fake kernels, derivatives and vmap rules; and what compiled graphs call.

Imports: `epilogues`, `arguments`, `planner`, `packs`, `calls`, `autograd`. Taken by `route`, `glu`, `fusion`.
"""
