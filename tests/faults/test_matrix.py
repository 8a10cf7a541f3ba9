"""Which tests hold which fault; many stand beside what they test.

| row | fault |
|---|---|
| 1-7 | saving, damaged checkpoints, resuming |
| 8-11 | signals, deaths, ranks that stop, exceptions on one rank |
| 12-15 | uneven data and batches, schedules, every backend against one process |
| 16-20 | unequal starts, checkpoints that do not fit, other worlds, configuration, NaN |
| 21-25 | a writer that fails, two jobs, hostile checkpoints |
| 26-31 | imports by configuration, sockets, secrets, permissions, leaks, unequal ranks |
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

ROWS = {
    1: ["faults/test_killed_save.py::test_row_01_killed_at_every_point_of_a_save"],
    2: ["faults/test_killed_save.py::test_row_02_order_of_flushing"],
    3: ["faults/test_reading.py::test_row_03_flipped_byte"],
    4: ["faults/test_reading.py::test_row_04_every_checkpoint_is_bad"],
    5: ["faults/test_saving.py::test_row_05_the_disk_is_full"],
    6: ["faults/test_saving.py::test_row_06_a_folder_that_is_read_only"],
    7: [
        "faults/test_resume.py::test_row_07_resume_at_any_step",
        "faults/test_resume.py::test_row_07_data_parallel",
        "faults/test_resume.py::test_row_07_pipeline",
        "faults/test_resume.py::test_row_07_tf_distribute",
        "faults/test_epoch_ends.py::test_row_07_validation_inside_epochs",
        "faults/test_epoch_ends.py::test_row_07_logs_of_an_epoch",
    ],
    8: [
        "faults/test_interrupted.py::test_row_08_at_any_step",
        "faults/test_interrupted.py::test_row_08_on_ranks",
        "faults/test_interrupted.py::test_row_08_workers",
        "faults/test_interrupted.py::test_row_08_under_the_launcher",
    ],
    9: [
        "faults/test_healing.py::test_ranks_lost_at_four_three_and_two_ranks",
        "faults/test_healing.py::test_joining_ranks_replace_lost_ranks",
        "faults/test_just_in_time_checkpoint.py::test_replicas_save_the_state_of_lost_ranks",
        "faults/test_missed.py::test_a_rank_lost_before_the_start_ends_all_and_they_restart",
        "faults/test_missed.py::test_a_rank_lost_after_fit_is_a_failure",
        "faults/test_missed.py::test_errors_name_lost_ranks_and_missing_ones",
        "launch/test_launch.py::test_rank_that_ends_without_a_traceback_is_named",
        "tf_distribute/test_launch.py::test_a_worker_names_the_one_that_stops_or_is_lost",
    ],
    10: [
        "faults/test_hanging.py::test_row_10_a_rank_that_hangs_says_where",
        "faults/test_hanging.py::test_row_10_a_rank_that_has_stopped_cannot",
        "faults/test_healing.py::test_ranks_lost_at_four_three_and_two_ranks",
        "faults/test_start.py::test_the_launcher_names_who_does_not_come_and_where_it_is",
        "faults/test_start.py::test_under_mpirun_the_ranks_end_by_themselves",
        "launch/test_stopped_in_horovod.py::test_a_rank_that_stops_is_named",
        "pipeline/test_stage_fails.py::test_a_stage_that_fails_anywhere_is_named_within_the_deadline",
    ],
    11: [
        "launch/test_launch.py::test_failing_rank_ends_all_and_its_traceback_is_last",
        "pipeline/test_stage_fails.py::test_an_exception_in_a_stage_ends_all_with_its_traceback",
        "data/test_ranks.py::test_an_error_in_one_ranks_pipeline",
    ],
    12: [
        "dist/test_same_numbers.py::test_float64_weights_equal_one_process",
        "data/test_ranks.py::test_batches_of_each_replica_count_once",
        "data/test_ranks.py::test_all_ranks_refuse",
    ],
    13: ["dist/test_same_numbers.py::test_batches_smaller_than_the_world_are_exact"],
    14: [
        "pipeline/test_golden.py::test_grids",
        "pipeline/test_timeline.py::test_a_deadlock_names_every_rank_and_its_action",
    ],
    15: [
        "contracts/test_local_equals_fit.py::test_every_model",
        "contracts/test_backends.py::test_models_equal_one_process",
        "pipeline/test_equality.py::test_weights_gradients_logs_and_outputs",
        "tf_distribute/test_equals_local.py::test_cases_in_one_process",
    ],
    16: [
        "callbacks/test_broadcast.py::test_before_the_first_step",
        "callbacks/test_broadcast.py::test_after_a_restore_on_rank_zero",
    ],
    17: ["faults/test_reading.py::test_row_17_a_mismatch_lists_all"],
    18: ["faults/test_resume.py::test_row_18_another_world_size"],
    19: [
        "config/test_refused.py::test_unknown_keys",
        "config/test_refused.py::test_wrong_types_and_bounds",
        "config/test_refused.py::test_contradictions",
        "launch/test_launch.py::test_config_mistake_is_found_before_a_process_starts",
    ],
    20: [
        "faults/test_spoilt.py::test_row_20_local",
        "faults/test_spoilt.py::test_row_20_stop",
        "faults/test_spoilt.py::test_row_20_a_loss_scale_is_halved",
        "faults/test_spoilt.py::test_row_20_data_parallel",
        "faults/test_spoilt.py::test_row_20_pipeline",
        "faults/test_spoilt.py::test_row_20_tf_distribute",
    ],
    21: ["faults/test_saving.py::test_row_21_the_background_writer_fails"],
    22: ["faults/test_saving.py::test_row_22_two_jobs_on_one_folder"],
    23: ["faults/test_reading.py::test_row_23_a_pickle"],
    24: ["faults/test_reading.py::test_row_24_file_names_stay_inside"],
    25: ["faults/test_reading.py::test_row_25_sizes_that_lie_and_bombs"],
    26: [
        "config/test_callback_registry.py::test_import_paths_are_refused_without_importing",
        "config/test_callback_registry.py::test_targets_are_not_read",
    ],
    27: [
        "launch/test_launch.py::test_listens_on_loopback_alone",
        "tf_distribute/test_server_interface.py::test_a_server_is_moved_and_serves",
        "faults/test_healing.py::test_joining_ranks_replace_lost_ranks",
    ],
    28: ["faults/test_process.py::test_row_28_a_planted_secret"],
    29: ["faults/test_saving.py::test_row_29_private_even_without_a_umask"],
    30: [
        "faults/test_process.py::test_row_30_cycles",
        "faults/test_process.py::test_row_30_cycles_on_ranks",
        "faults/test_process.py::test_row_30_cycles_of_a_pipeline",
        "faults/test_process.py::test_row_30_cycles_of_a_strategy",
    ],
    31: [
        "dist/test_agreement.py::test_an_unseeded_shuffle_is_found_before_step_1",
        "dist/test_agreement.py::test_another_model_is_found_before_step_1",
        "dist/test_agreement.py::test_another_config_is_found_before_step_1",
        "dist/test_agreement.py::test_other_library_versions_are_found",
    ],
}


def _functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", range(1, 32))
def test_every_row_has_tests(row: int) -> None:
    assert ROWS[row]
    for test in ROWS[row]:
        file, _, name = test.partition("::")
        assert name in _functions(file), test
