"""The part of the suites that ``--ml-quick`` runs: about a minute where each shape is compiled.

It is for the time in which a backend is written. It finds what goes wrong most often, and is no conformance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

QUICK: Mapping[str, str] = {
    # dtypes and creation
    "test_every_bit_goes_in_and_comes_out_again": "",
    "test_cast_converts_exactly_as_the_contract_says": "-cast$|-BOOL-copy$",
    "test_full_repeats_the_value_as_that_dtype": "F32",
    "test_arange_is_start_plus_i_steps_up_to_but_without_stop": "^3, 20, 4-F32",
    "test_arange_counts_exactly_whatever_kind_of_number_it_is_given": "",
    "test_dlpack_shows_the_same_elements_where_the_framework_offers_it": "F16",
    "test_memory_grows_with_a_tensor_and_shrinks_when_its_last_view_goes": "",
    "test_what_goes_in_and_comes_out_is_copied": "",
    "test_native_of_one_tensor_becomes_another_through_from_native": "F32",
    "test_an_array_of_numpys_is_made_of_a_tensor": "F32",
    # views and aliasing
    "test_views_of_views_are_those_of_numpy_and_alias": "",
    "test_slice_is_numpys_without_wrapping": "",
    "test_bad_arguments_are_refused_and_nothing_is_written": r"^[vxs]\.",
    "test_a_write_is_seen_by_a_view_handed_out_before_it": "",
    "test_host_data_may_change_as_soon_as_the_call_returns": "",
    "test_a_read_before_a_write_keeps_what_it_read": "",
    "test_an_overlapping_copy_acts_as_if_the_source_were_read_first": "F32",
    "test_copy_writes_what_the_destination_shows_and_nothing_else": "^4, 3-(contiguous|stepped)",
    "test_copy_refuses_shapes_that_differ": "",
    "test_a_destination_whose_elements_share_memory_is_read_only": "",
    "test_reserve_writes_nothing_and_forgets_nothing": "",
    "test_other_results_are_new_storage": "",
    "test_one_long_walk_agrees_with_flat_memory": "",
    "test_random_views_are_read_as_numpys_as_strided": "^[0-3]-F32",
    "test_a_backend_opened_in_one_thread_is_used_in_others": "",
    # rows
    "test_rows_gathers_along_any_axis": "^[01]-",
    "test_rows_reads_views_of_any_dtype": "^(offset|permuted|stepped)-[01]-.*-F32$",
    "test_set_rows_scatters_along_any_axis": "^[01]-",
    "test_set_rows_from_its_own_rows_reads_them_first": "",
    "test_a_host_index_outside_the_axis_is_refused_by_both": "",
    "test_a_row_written_twice_is_refused": "",
    "test_repeat_tiles_the_axis": "F32",
    # arithmetic
    "test_functions_match_float64": r"^a\.(exp\(\) of \(\)|mul\(b\) of \(4, 3\) and \(3,\)|round\(\) of \(9,"
    r"|gelu\(\) of \(112,|rms_norm\(None, 0\.0\) of|softmax\(\) of)[^a-z]*-F(32|16)",
    "test_results_are_exact": r"^(F32|F16|I32), .*\.(matmul|sum|argmax|argsort|top_k)\("
    r"|^I32, .*\.scale\(2\.0\)|^U8, .*\.neg\(",
    "test_compare_gives_bool_by_symbol_and_by_name": "^lt-(F32|BOOL)$",
    "test_neighbouring_numbers_are_not_equal": "^(eq|lt)-(F32|I32)$",
    "test_a_logit_of_minus_infinity_weighs_exactly_nothing": "^-1-F(32|16)-contiguous",
    "test_functions_of_special_values_match_float64": r"^a\.(exp|sin|gelu|silu)\(\)-F32-contiguous",
    "test_a_million_equal_numbers_are_added_without_drift": "^sum-the outer of two-F32",
    # capabilities, where a backend has them
    "test_attention_matches_float64_with_and_without_a_mask": "^F32-grouped-5, 9$",
    "test_the_mask_may_have_any_float_dtype_and_padded_rows": "^F32-F32$",
    "test_sinks_take_part_in_the_softmax_and_are_dropped": "^F32-causal-4$",
    "test_part_of_a_history_is_attended_to_with_its_log_sum_exp": "^F32-grouped-5, 9$",
    "test_each_batch_has_a_mask_of_any_float_dtype_and_padded_rows": "^F32-F32$",
    "test_each_query_attends_to_the_rows_that_its_plan_names": "^F32-grouped-3 of 40",
    "test_rows_that_were_written_are_read_back_and_no_others_change": "",
    "test_each_query_attends_to_the_codes_that_its_plan_names": "^Q8_0, Q4_0-1, 0, 2-4, 2-3 of 40",
    "test_codes_are_written_where_they_belong_and_nowhere_else": "^1, 0, 2-Q8_0, Q4_0-F32-5, 1-",
    "test_rope_is_the_generic_rope": "^F32-",
    "test_rows_are_multiplied_by_matrices_of_their_own": "^F32-",
    "test_arrays_that_go_together_arrive_as_one_by_one": "",
    "test_a_borrowed_array_reads_as_it_is": "",
    "test_cache_config_is_a_cache_config": "",
    "test_the_sum_of_one_rank_is_its_own_and_new_storage": "",
    # caches and a model
    "test_after_sharing_removing_and_moving": r"\[causal\]",
    "test_layers_keep_apart": r"\[head major-causal\]",
    "test_the_bundled_model_says_what_it_says_on_numpy": "",
}
"""The tests, each with a pattern of which of its parameters or cases: all, where it is empty."""


def has_case(test: str, case: str) -> bool:
    """Whether that case of a test's table is one of them."""
    return re.search(QUICK.get(test, ""), case) is not None


def chosen(item: pytest.Item) -> bool:
    """Whether it is one of them."""
    pattern = QUICK.get(getattr(item, "originalname", item.name))
    return pattern is not None and (
        not hasattr(item, "callspec") or re.search(pattern, item.name) is not None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if not chosen(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if chosen(item)]
