"""Which part of the repository may import which.

A part is a folder without its subfolders, a file, or a group of files of one folder. It may import itself and what its
row names. Any module below a folder may import modules of that folder that import nothing of the repository. Imports
inside functions and for types count.
"""

# Ways to compute attention do not import one another. What starts kernels needs `triton:launching`; what chooses tiles
# for attention needs `triton:choosing`.
_GROUPS = {
    "sparseflash/backends:blockwise": "blockwise blockwise_tiles",
    "sparseflash/backends/triton:launching": "architecture availability compile_ahead configs device "
    "direct_start launcher native",
    "sparseflash/backends/triton:choosing": "alignment family overrides",
    "sparseflash/backends/triton/hopper:device": "configs descriptors gluon_api record rows scores table_sums",
    # Whole functions of other libraries, above `attention`; the rest of `interop` is below it.
    "sparseflash/interop:functions": "alibi fastvideo flash_attn flash_attn_cache flash_attn_packed flash_attn_varlen "
    "flex_attention megatron natten natten_layers paged sglang tokens_first torchtitan vllm xformers",
    "experiments/benchmarks:timing": "fresh_process interpreter timing",
}

_LIBRARY = {
    ".": "attention.py blockmask explain.py merge.py scaled_dot_product.py varlen.py",
    "__main__.py": "cli",
    "attention.py": "backends backends:blockwise backends/reference.py backends/triton blockmask scores validation.py",
    "captured.py": "blockmask",
    "decode.py": "backends backends/cached.py backends/triton/decode backends/triton:launching blockmask "
    "decode_checks.py scores validation.py",
    "decode_checks.py": "backends/cached.py blockmask validation.py",
    "explain.py": "attention.py backends backends/triton backends/triton:choosing backends/triton:launching blockmask "
    "scores validation.py",
    "grouped.py": "attention.py backends/chosen_blocks.py blockmask masks/block_index.py merge.py scores validation.py",
    "merge.py": "backends/triton backends/triton:launching scores",
    "packed_pattern.py": "blockmask masks masks/tiling pattern.py",
    "pattern.py": "blockmask",
    "scaled_dot_product.py": "attention.py blockmask interop masks scores",
    "selected_tokens.py": "attention.py backends/reference.py backends/selected.py blockmask validation.py",
    "validation.py": "blockmask scores",
    "varlen.py": "attention.py blockmask blockmask/ops captured.py masks packed_pattern.py pattern.py scores",
    "analysis": "blockmask",
    "blockmask": "blockmask/mask.py",
    "blockmask/mask.py": "blockmask blockmask/methods",
    "blockmask/methods": "blockmask blockmask/ops draw masks/block_index.py",
    "blockmask/ops": "blockmask",
    "cli": ". analysis attention.py backends/triton:launching draw explain.py interop masks testing",
    "distributed": "attention.py blockmask merge.py scores validation.py",
    "draw": "blockmask",
    "huggingface": "attention.py blockmask decode.py interop scores",
    "interop": "blockmask captured.py scores",
    "interop:functions": "attention.py blockmask blockmask/ops captured.py decode.py interop masks masks/tiling nn "
    "pattern.py scaled_dot_product.py scores varlen.py",
    "masks": "blockmask blockmask/ops masks/fused masks/tiling",
    "masks/block_index.py": "blockmask masks/fused masks/tiling",
    "masks/fused": "backends/triton:launching backends/triton/device_functions backends/triton/selected blockmask "
    "masks/tiling",
    "masks/tiling": "blockmask",
    "nn": "attention.py blockmask captured.py decode.py masks pattern.py scaled_dot_product.py scores validation.py",
    "scores": "blockmask",
    "selection": "attention.py backends backends/chosen_blocks.py backends/triton/selected blockmask decode.py "
    "grouped.py masks masks/fused masks/tiling nn scores selected_tokens.py",
    "testing": "backends/reference.py blockmask scores validation.py",
    "backends": "blockmask scores",
    "backends:blockwise": "backends blockmask scores",
    "backends/cached.py": "backends/reference.py blockmask scores",
    "backends/reference.py": "blockmask scores",
    "backends/chosen_blocks.py": "backends backends/selected.py backends/triton/selected",
    "backends/selected.py": "backends backends/triton/selected",
    "backends/triton": "backends backends/triton:choosing backends/triton:launching backends/triton/hopper "
    "backends/triton/hopper:device backends/triton/launch backends/triton/portable backends/triton/schedule blockmask "
    "scores",
    "backends/triton:choosing": "backends/triton:launching backends/triton/schedule blockmask scores",
    "backends/triton:launching": "blockmask",
    "backends/triton/changes": "backends/triton:choosing backends/triton:launching backends/triton/device_functions "
    "backends/triton/hopper:device backends/triton/hopper/learned.py backends/triton/launch backends/triton/portable "
    "backends/triton/schedule blockmask scores",
    "backends/triton/device_functions": "backends/triton:launching backends/triton/changes backends/triton/schedule",
    "backends/triton/launch": "backends/triton:launching backends/triton/device_functions blockmask",
    "backends/triton/decode": "backends/cached.py backends/triton:launching backends/triton/changes "
    "backends/triton/device_functions blockmask scores",
    "backends/triton/hopper": "backends backends/triton:choosing backends/triton:launching backends/triton/changes "
    "backends/triton/device_functions backends/triton/hopper:device backends/triton/hopper/learned.py "
    "backends/triton/launch backends/triton/persistent backends/triton/schedule blockmask scores",
    # What score modifications need on Hopper: for their device functions, and for the sums of their gradients.
    "backends/triton/hopper:device": "backends/triton:choosing backends/triton:launching "
    "backends/triton/device_functions backends/triton/launch blockmask",
    "backends/triton/hopper/learned.py": "backends/triton/persistent "
    "backends/triton/hopper:device backends/triton/launch",
    # Run on its own, not imported: it tries the kernels as a user of the library would.
    "backends/triton/kernel_check.py": "attention.py backends backends/triton backends/triton/hopper "
    "backends/triton/hopper:device blockmask scores testing",
    "backends/triton/persistent": "backends/triton:launching backends/triton/schedule blockmask",
    "backends/triton/portable": "backends backends/triton:choosing backends/triton:launching backends/triton/changes "
    "backends/triton/device_functions backends/triton/launch backends/triton/schedule blockmask scores",
    "backends/triton/selected": "backends backends/triton:launching backends/triton/device_functions",
    "backends/triton/schedule": "backends backends/triton:choosing backends/triton:launching blockmask blockmask/ops",
}

_PUBLIC = (
    ". attention.py decode.py grouped.py merge.py nn scaled_dot_product.py varlen.py analysis distributed draw interop "
    "scores selection testing masks"
)

_EXPERIMENTS = {
    ".": "",
    "measurements.py": "training sparseflash",
    "training": "PUBLIC",
    "training/layers": "PUBLIC",
    "pathfinder": "training",
    "pathfinder/cnn": "training",
    "lra": "measurements.py lra/data lra/data/listops lra/model lra/no_attention lra/table lra/tasks training "
    "training/layers PUBLIC",
    "lra/data": "lra/tasks training",
    "lra/data/listops": "training",
    "lra/model": "lra lra/tasks training training/layers sparseflash/cli PUBLIC",
    "lra/no_attention": "measurements.py lra lra/data lra/model lra/table lra/tasks pathfinder/cnn training",
    "lra/table": "benchmarks:timing measurements.py lra lra/data lra/model lra/tasks training",
    "lra/tasks": "lra/data lra/data/listops lra/model pathfinder pathfinder/cnn training",
    "pathx": "measurements.py pathfinder pathfinder/cnn pathx/data pathx/masks pathx/model training PUBLIC",
    "pathx/data": "pathfinder pathx pathx/masks pathx/model training PUBLIC",
    "pathx/masks": "sparseflash/blockmask sparseflash/cli PUBLIC",
    "pathx/model": "pathfinder/cnn pathx/data pathx/masks training/layers sparseflash/nn",
    "selection": "measurements.py training sparseflash/cli PUBLIC",
    "lm": "measurements.py lm/data lm/model training sparseflash/cli PUBLIC",
    "lm/data": "training",
    "lm/model": "lm training training/layers PUBLIC",
    "benchmarks": "benchmarks/harness benchmarks:timing benchmarks/speed/peers PUBLIC",
    "benchmarks/calls.py": "benchmarks/harness benchmarks:timing sparseflash/backends/triton:launching PUBLIC",
    "benchmarks/layer.py": "benchmarks/harness benchmarks/speed benchmarks/speed/peers",
    "benchmarks:timing": "training",
    "benchmarks/__main__.py": "benchmarks/harness measurements.py",
    "benchmarks/harness": "benchmarks:timing measurements.py training",
    "benchmarks/compile": "benchmarks/harness training BACKENDS sparseflash/blockmask PUBLIC",
    "benchmarks/distributed": "benchmarks/harness training PUBLIC",
    "benchmarks/exactness": "benchmarks/harness measurements.py training",
    "benchmarks/gpt.py": "benchmarks/harness benchmarks/speed/peers lm lm/model training",
    "benchmarks/huggingface": "benchmarks/harness benchmarks:timing measurements.py training "
    "sparseflash/huggingface PUBLIC",
    "benchmarks/io.py": "benchmarks/harness training training/layers sparseflash/explain.py PUBLIC",
    "benchmarks/masks.py": "benchmarks/harness benchmarks/patterns PUBLIC",
    "benchmarks/patterns": "benchmarks/harness benchmarks/patterns/entries training sparseflash/blockmask PUBLIC",
    "benchmarks/patterns/entries": "PUBLIC",
    "benchmarks/selection": "benchmarks/harness benchmarks:timing benchmarks/speed/peers measurements.py PUBLIC",
    "benchmarks/speed": "benchmarks/harness benchmarks/speed/peers sparseflash/blockmask PUBLIC",
    "benchmarks/speed/peers": "benchmarks/harness benchmarks/speed PUBLIC",
    "benchmarks/tune.py": "benchmarks/compile benchmarks/harness benchmarks:timing benchmarks/speed training BACKENDS "
    "PUBLIC",
}


def _path(name, top):
    here = name.partition("/")[0]
    return top if name == "." else name if here in ("masks", "sparseflash") else f"{top}/{name}"


GROUPS = {
    group: tuple(f"{group.partition(':')[0]}/{name}.py" for name in names.split()) for group, names in _GROUPS.items()
}
PUBLIC = tuple(_path(name, "sparseflash") for name in _PUBLIC.split())
MAY_IMPORT = {
    _path(row, "sparseflash"): {_path(name, "sparseflash") for name in names.split()} for row, names in _LIBRARY.items()
}
BACKENDS = tuple(row for row in MAY_IMPORT if row.startswith("sparseflash/backends"))
for _row, _names in _EXPERIMENTS.items():
    _found = {_path(name, "experiments") for name in _names.split() if name not in ("BACKENDS", "PUBLIC")}
    MAY_IMPORT[_path(_row, "experiments")] = _found.union(
        BACKENDS if "BACKENDS" in _names.split() else (), PUBLIC if "PUBLIC" in _names.split() else ()
    )

# The one deliberate circle: `BlockMask` has the operations on masks as methods, and these import it.
FACADE = "sparseflash.blockmask.mask"

# Modules that need Triton when they are imported; other modules import them inside functions.
KERNELS = (
    "sparseflash/backends/triton", "masks/fused/block_scores.py", "masks/fused/index.py", "masks/fused/largest.py",
    "masks/fused/rows.py", "masks/fused/runs.py", "masks/fused/select.py", "masks/fused/starts.py",
    "masks/fused/summed_scores.py", "masks/fused/tile_scores.py", "masks/fused/unused.py",
)  # fmt: skip
