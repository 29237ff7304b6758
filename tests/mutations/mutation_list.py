"""Small faults that a test must notice: a text of a file, its replacement, and the test."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault and its test."""

    name: str
    file: str
    old: str  # once in the file
    new: str
    test: str  # as pytest names it


PORTABLE, HOPPER = "sparseflash/backends/triton/portable", "sparseflash/backends/triton/hopper"

MUTATIONS = [
    Mutation(
        "portable lengths: only 128 tiles are counted",
        f"{PORTABLE}/walk.py",
        "for first in range(start, stop, CHUNK):",
        "for first in range(start, start + 1, CHUNK):",
        "tests/backends/test_exactness.py::test_lengths_cut_lists_of_more_than_128_tiles",
    ),
    Mutation(
        "decode: a repeated page counts twice",
        "sparseflash/decode.py",
        "return pages.masked_fill(again, -1)",
        "return pages",
        "tests/test_decode.py::test_a_page_that_is_chosen_twice_counts_once",
    ),
    Mutation(
        "dropout: the seed's upper half from bit 31 on",
        "sparseflash/dropout.py",
        "(seed >> 32) & _WORD",
        "(seed >> 31) & _WORD",
        "tests/backends/test_dropout.py::test_what_is_kept_is_what_keep_mask_says",
    ),
    Mutation(
        "Hopper forward: the maximum lags behind by 2^20",
        f"{HOPPER}/forward.py",
        "SLACK = gl.constexpr(8.0)",
        "SLACK = gl.constexpr(20.0)",
        "tests/backends/triton/hopper/test_hopper_forward.py::"
        "test_a_maximum_that_grows_from_tile_to_tile_overflows_nothing_in_fp16",
    ),
    Mutation(
        "sums of fp32 without their compensation",
        "sparseflash/backends/triton/device_functions/softmax.py",
        "number -= lost",
        "number -= 0 * lost",
        "tests/backends/triton/test_softmax.py::test_sums_of_many_terms_are_rounded_once",
    ),
    Mutation(
        "exp2 of fp32 without its highest term",
        "sparseflash/backends/triton/device_functions/softmax.py",
        "series = 1.5252733804e-05",
        "series = 0.0",
        "tests/backends/triton/test_softmax.py::test_powers_of_two_are_right_to_within_an_ulp",
    ),
    Mutation(
        "relative: a bucket may be the number of columns",
        "sparseflash/scores/relative.py",
        "<= int(buckets.max()) < most:",
        "<= int(buckets.max()) <= most:",
        "tests/scores/test_scores_errors.py::test_what_does_not_fit",
    ),
    Mutation(
        "varlen: one mask for all blocks",
        "sparseflash/varlen.py",
        "key = q_sums, k_sums, pattern, block_pair(block), checked_device(device)",
        "key = q_sums, k_sums, pattern, checked_device(device)",
        "tests/test_varlen.py::test_masks_that_differ_in_anything_are_made_each",
    ),
    Mutation(
        "with_lengths: negative lengths stay negative",
        "sparseflash/blockmask/lengths.py",
        "lengths = lengths.clamp(0, mask.q_len).to(torch.int32)",
        "lengths = lengths.clamp(max=mask.q_len).to(torch.int32)",
        "tests/blockmask/test_with_lengths.py::test_lengths_are_clamped_to_what_there_is",
    ),
    Mutation(
        "load: members may be longer than the file",
        "sparseflash/blockmask/serialization.py",
        "if total > size:",
        "if False:",
        "tests/blockmask/test_serialization.py::test_members_that_are_longer_than_the_file_are_refused_before_any_is_read",
    ),
    Mutation(
        "selected_attention: groups of 256 are refused",
        "sparseflash/grouped.py",
        "if group > BLOCKS[-1]:",
        "if group >= BLOCKS[-1]:",
        "tests/test_grouped.py::test_a_group_has_up_to_256_heads",
    ),
    Mutation(
        "chosen tokens: a repetition counts again",
        "sparseflash/backends/triton/selected/lists.py",
        "token = tl.where((token == before) & (lane > 0), NONE, token)",
        "token = tl.where((token == before) & (lane > CHOICES), NONE, token)",
        "tests/test_selected_tokens.py::test_attention_to_chosen_tokens_is_exact_with_its_gradients",
    ),
    Mutation(
        "chosen tokens: a query's own bit does not count",
        "sparseflash/backends/triton/selected/places.py",
        "own = -1 << (query % 32).to(tl.int32)",
        "own = -2 << (query % 32).to(tl.int32)",
        "tests/test_selected_tokens.py::test_chunks_of_queries_add_up",
    ),
    Mutation(
        "chosen tokens: a token has the rows of its last chunk only",
        "sparseflash/backends/triton/selected/token_sums.py",
        "tl.load(pointers, mask=exists) + total",
        "total",
        "tests/test_selected_tokens.py::test_chunks_of_queries_add_up",
    ),
    Mutation(
        "select_blocks: of equal scores the last block wins",
        "masks/fused/select.py",
        "(block ^ _LAST).to(tl.int64)",
        "block.to(tl.int64)",
        "tests/masks/test_masks_select_blocks.py::test_of_equal_scores_the_first_block_wins",
    ),
    Mutation(
        "work items: number 2^31 is let through",
        "sparseflash/limits.py",
        "if count >= COUNT:",
        "if count > COUNT:",
        "tests/backends/triton/test_plan.py::test_items_are_numbered_in_31_bits",
    ),
    Mutation(
        "Hopper lengths: only 128 tiles are counted",
        f"{HOPPER}/forward.py",
        "for first in range(start, stop, CHUNK):",
        "for first in range(start, start + 1, CHUNK):",
        "tests/backends/triton/hopper/test_hopper_forward.py::test_lengths_cut_lists_of_more_than_128_tiles",
    ),
    Mutation(
        "Hopper backward: 256 entries of a table are refused",
        f"{HOPPER}/support.py",
        "request.entries > MOST_ENTRIES:",
        "request.entries >= MOST_ENTRIES:",
        "tests/backends/triton/hopper/test_hopper_scores.py::test_they_take_tables_by_distance_alone_or_with_a_sink",
    ),
    Mutation(
        "decode: a prepared call serves any scale",
        "sparseflash/decode.py",
        "return *layouts, *numbers, scale\n",
        "return *layouts, *numbers\n",
        "tests/test_decode.py::test_calls_that_differ_in_anything_are_prepared_each",
    ),
    Mutation(
        "decode: a prepared call serves any number of splits",
        "sparseflash/decode.py",
        "return *layouts, *numbers, scale\n",
        "return *layouts, *numbers[:3], scale\n",
        "tests/test_decode.py::test_calls_that_differ_in_anything_are_prepared_each",
    ),
    Mutation(
        "decode: a table with gaps is read as it is",
        "sparseflash/decode.py",
        "not (tensors[5] is None or tensors[5].is_contiguous())",
        "False",
        "tests/test_decode.py::test_calls_that_differ_in_anything_are_prepared_each",
    ),
    Mutation(
        "decode: a negative scale reaches the kernels",
        "sparseflash/decode.py",
        "if scale < 0:\n",
        "if False:\n",
        "tests/test_decode.py::test_a_negative_scale_is_that_of_negative_queries",
    ),
    Mutation(
        "varlen: running sums are read once, whatever is written",
        "sparseflash/varlen.py",
        " and found[1] == values._version:",
        ":",
        "tests/test_varlen.py::test_running_sums_that_are_written_to_are_read_again",
    ),
    Mutation(
        "columns: the room's numbers do not count for the width",
        "sparseflash/blockmask/csr.py",
        "(patterns + 1) * col_blocks <= torch.iinfo",
        "patterns * col_blocks <= torch.iinfo",
        "tests/blockmask/test_dynamic.py::test_columns_are_right_however_wide_the_mask",
    ),
    Mutation(
        "blockwise: the lengths of the first heads for all",
        "sparseflash/backends/blockwise_tiles.py",
        "None if self.stops is None else self.stops[h]",
        "None if self.stops is None else self.stops[heads[: len(h)]]",
        "tests/backends/test_exactness.py::test_blockwise_is_exact_a_few_scores_at_a_time",
    ),
    Mutation(
        "blockwise: only the first rows",
        "sparseflash/backends/blockwise_tiles.py",
        "for r in range(0, len(rows), some_rows):",
        "for r in range(0, min(1, len(rows)), some_rows):",
        "tests/backends/test_exactness.py::test_blockwise_is_exact_a_few_scores_at_a_time",
    ),
    Mutation(
        "spans: tiles of a second portion are numbered as the first's",
        "masks/tiling/spans.py",
        "        offset += len(made)\n",
        "",
        "tests/masks/test_masks_tiling.py::test_a_mask_is_the_same_made_in_portions",
    ),
    Mutation(
        "FlashMask: tiles of a second portion are numbered as the first's",
        "sparseflash/interop/interval_tiles.py",
        "        offset += len(distinct)\n",
        "",
        "tests/interop/test_interop.py::test_what_is_converted_in_portions_is_the_same",
    ),
    Mutation(
        "reach: only the first targets are composed",
        "sparseflash/analysis/composition.py",
        "for first in range(0, len(open_rows), step):",
        "for first in range(0, min(1, len(open_rows)), step):",
        "tests/analysis/test_counts.py::test_counts_are_the_same_in_portions",
    ),
    Mutation(
        "distributed: sums of shared rows are rounded at every step",
        "sparseflash/distributed/rows.py",
        "torch.promote_types(first.dtype, torch.float32)",
        "first.dtype",
        "tests/distributed/test_distributed_rows.py::test_rows_that_two_tensors_have_are_rounded_once",
    ),
    Mutation(
        "distributed: runs that share a row count as apart",
        "sparseflash/distributed/rows.py",
        "(ends[:-1] <= starts[1:]).all()",
        "(ends[:-1] <= starts[1:] + 1).all()",
        "tests/distributed/test_distributed_rows.py::test_rows_that_go_to_two_ranks_are_added_for_both",
    ),
    Mutation(
        "calls: one prepared for any scale",
        "sparseflash/backends/triton/call_cache.py",
        "key = layouts, scale, lengths, insisted, kernels",
        "key = layouts, lengths, insisted, kernels",
        "tests/backends/triton/test_call_cache.py::test_calls_that_differ_in_anything_have_keys_of_their_own",
    ),
    Mutation(
        "calls: one prepared for tensors at any address",
        "sparseflash/backends/triton/native.c",
        "((uintptr_t)t.data + t.byte_offset) % 16;",
        "0;",
        "tests/backends/triton/test_native.py::test_layouts_are_equal_where_they_are_in_python",
    ),
    Mutation(
        "starts: a number is cut to its width",
        "sparseflash/backends/triton/native.c",
        "(value >> (8 * width - 1)) != 0 && (value >> (8 * width - 1)) != -1) goto too_large;",
        "(value >> (8 * width - 1)) != 0 && (value >> (8 * width - 1)) != -1) (void)0;",
        "tests/backends/triton/test_native.py::test_a_call_that_is_wrong_says_so",
    ),
    Mutation(
        "starts: a bound kernel shares the parameters of the others",
        "sparseflash/backends/triton/native.c",
        "int status = write_values(kernel, arguments[1], (int32_t)slots, made->contents);",
        "int status = write_values(kernel, arguments[1], (int32_t)slots, kernel->contents);",
        "tests/backends/triton/test_direct_start.py::"
        "test_a_kernel_reads_what_each_call_gives_and_what_was_given_before",
    ),
    Mutation(
        "launches: one prepared for any dropout",
        "sparseflash/backends/triton/call_keys.py",
        "*setting[1:], problem.scale, problem.dropped, problem.kernels, tensors[0].dtype",
        "*setting[1:], problem.scale, problem.kernels, tensors[0].dtype",
        "tests/backends/triton/test_call_cache.py::test_launches_that_differ_in_anything_have_keys_of_their_own",
    ),
    Mutation(
        "changed scores: machine code is looked up without the facts that it is compiled for",
        "sparseflash/backends/triton/changes/kind.py",
        "in {**functions, **facts}.items()",
        "in functions.items()",
        "tests/backends/triton/test_changes.py::test_an_edited_device_function_and_another_fact_are_compiled_anew",
    ),
    Mutation(
        "tables: a tile with one code past a bucket has one bucket",
        "sparseflash/backends/triton/changes/table.py",
        ">= largest\n    return code",
        "+ 1 >= largest\n    return code",
        "tests/scores/test_scores_relative.py::test_buckets_may_begin_anywhere_in_a_tile",
    ),
    Mutation(
        "tables: a tile with one code past the first bucket has that bucket",
        "sparseflash/backends/triton/changes/table.py",
        "largest <= first_end, smallest",
        "largest <= first_end + 1, smallest",
        "tests/scores/test_scores_relative.py::test_buckets_may_begin_anywhere_in_a_tile",
    ),
    Mutation(
        "changed scores: everything below -3e30 is equal",
        "sparseflash/backends/triton/device_functions/softmax.py",
        "LOWEST = tl.constexpr(-3e38)",
        "LOWEST = tl.constexpr(-3e30)",
        "tests/backends/test_scores.py::"
        "test_weights_of_rows_with_only_very_low_biases_are_finite_and_the_least_low_wins",
    ),
    Mutation(
        "decode: a window's first tile is one key late",
        "sparseflash/backends/triton/decode/kernels.py",
        "first = tl.maximum(length - q_len - window + 1, start) // BLOCK_N",
        "first = tl.maximum(length - q_len - window + 2, start) // BLOCK_N",
        "tests/test_decode.py::test_windows_and_sinks_may_end_anywhere_in_a_tile",
    ),
    Mutation(
        "decode: tiles of sinks and of a window count twice",
        "sparseflash/backends/triton/decode/kernels.py",
        "tl.minimum(stop, first) - first_sink",
        "stop - first_sink",
        "tests/test_decode.py::test_windows_and_sinks_may_end_anywhere_in_a_tile",
    ),
    Mutation(
        "relative: codes are kept for any number of keys",
        "sparseflash/scores/relative.py",
        "key = sizes.q_len, sizes.k_len, sizes.device",
        "key = sizes.q_len, sizes.device",
        "tests/scores/test_scores_relative.py::test_one_table_serves_any_lengths",
    ),
    Mutation(
        "decode: a sink alone in its tile is lost",
        "sparseflash/backends/triton/decode/kernels.py",
        "stop = (start + sinks + BLOCK_N - 1) // BLOCK_N",
        "stop = (start + sinks + BLOCK_N - 2) // BLOCK_N",
        "tests/test_decode.py::test_windows_and_sinks_may_end_anywhere_in_a_tile",
    ),
]
