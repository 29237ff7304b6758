"""Plans of persistent kernels, which run one program per multiprocessor: the items of each program and their order.

`plan` and `dynamic_plan` make the forward's plan, `backward_plan` and `cuts` the backward's; `fused_plan`, `timeline`
and `dealing` make the same plan by kernels on a GPU.
"""
