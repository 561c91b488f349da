"""The part of the suites that ``--ml-quick`` runs: about a minute where each shape is compiled.

It is for the time in which a backend is written. It finds what goes wrong most often, and is no conformance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

__all__ = ["QUICK", "chosen"]

QUICK: Mapping[str, Mapping[str, str]] = {
    "dtypes": {
        "test_every_bit_goes_in_and_comes_out_again": "",
        "test_cast_converts_exactly_as_the_contract_says": "",
        "test_copy_converts_as_cast_does": r"-BOOL\]",
    },
    "creation": {
        "test_full_repeats_the_value_as_that_dtype": "F32",
        "test_arange_is_start_plus_i_steps_up_to_but_without_stop": "3-20-4-DType.F32",
        "test_memory_grows_with_a_tensor_and_shrinks_when_its_last_view_goes": "",
        "test_from_numpy_copies": "",
        "test_to_numpy_copies": "",
    },
    "views": {
        "test_view_counts_from_the_first_element_shown_and_may_leave_it": "",
        "test_view_of_a_view_is_bound_by_the_storage_not_by_what_is_shown": "",
        "test_slice_is_numpys_without_wrapping": "",
        "test_slice_refuses_what_wraps_or_leaves_the_axis": "",
        "test_permute_is_numpy_transpose": "",
        "test_reshape_refuses_what_needs_a_copy": "",
    },
    "aliasing": {
        "test_a_write_is_seen_by_a_view_handed_out_before_it": "",
        "test_host_data_may_change_as_soon_as_the_call_returns": "",
        "test_a_read_before_a_write_keeps_what_it_read": "",
        "test_an_overlapping_copy_acts_as_if_the_source_were_read_first": "F32",
        "test_copy_writes_what_the_destination_shows_and_nothing_else": r"\(4, 3\)-(contiguous|stepped)",
        "test_copy_refuses_shapes_that_differ": "",
        "test_a_destination_whose_elements_share_memory_is_read_only": "",
        "test_reserve_writes_nothing_and_forgets_nothing": "",
        "test_other_results_are_new_storage": "",
    },
    "rows": {
        "test_rows_gathers_along_any_axis": r"\[[01]-",
        "test_set_rows_scatters_along_any_axis": r"\[[01]-",
        "test_set_rows_from_its_own_rows_reads_them_first": "",
        "test_a_host_index_outside_the_axis_is_refused_by_both": "",
        "test_a_row_written_twice_is_refused": "",
        "test_repeat_tiles_the_axis": "F32",
    },
    "a walk": {"test_one_long_walk_agrees_with_flat_memory": ""},
    "arithmetic": {
        "test_unary_operations_keep_shape_and_dtype": r"\[\(\)-exp\]",
        "test_binary_operations_broadcast_as_numpy": r"\[(\(\)-\(\)|\(4, 3\)-\(3,\))-DType.F32-mul",
        "test_binary_operands_share_a_dtype": "",
        "test_matmul_accumulates_in_f32_or_better": "",
        "test_sums_of_integers_and_bool_are_i64": "",
        "test_argmax_of_ties_is_the_first": "F32",
        "test_softmax_survives_large_logits_and_masks": "F32",
        "test_rms_norm_squares_in_f32_or_better": "",
        "test_top_k_gives_the_largest_descending_and_where_they_are": "3-DType.F32",
        "test_argsort_ascends_and_equal_values_keep_their_order": "F32",
        "test_gelu_is_exact_by_default_and_tanh_on_request": "F32",
        "test_round_takes_halves_to_even": "F32",
    },
    "a cache": {
        "test_after_sharing_removing_and_moving": r"\[causal\]",
        "test_layers_keep_apart": r"\[head major-causal\]",
    },
    "a model": {"test_the_bundled_model_says_what_it_says_on_numpy": ""},
}
"""By subject, the tests, each with a pattern of which of its parameters: all, where it is empty."""

_CHOSEN = {test: pattern for tests in QUICK.values() for test, pattern in tests.items()}


def chosen(item: pytest.Item) -> bool:
    """Whether it is one of them."""
    pattern = _CHOSEN.get(getattr(item, "originalname", item.name))
    return pattern is not None and re.search(pattern, item.name) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if not chosen(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if chosen(item)]
