"""A part of the contract suites of transports on NCCL, with 2, 3 and 4 ranks on one GPU.

Tensors in host memory pass through the GPU there; `test_nccl_collectives.py` asks the same of CUDA tensors. A case for
another number of ranks is skipped.
"""

from __future__ import annotations

import pytest
import torch

from contracts import test_concurrency, test_exchange
from contracts.test_broadcast import (  # noqa: F401
    test_barrier_returns,
    test_collectives_of_all_kinds_in_a_row,
    test_every_dtype_and_every_source,
    test_from_rank_0_by_default,
)
from contracts.test_broadcast import test_bits_pass_unchanged as test_bits_are_broadcast_unchanged  # noqa: F401
from contracts.test_broadcast import test_tensors_of_every_form as test_broadcast_of_every_form  # noqa: F401
from contracts.test_concurrency import (  # noqa: F401
    test_a_barrier_never_lets_go_early,
    test_operations_of_all_kinds_in_flight,
    test_synchronous_calls_wait_for_asynchronous_ones,
    test_threads_that_share_a_transport,
)
from contracts.test_exchange import (  # noqa: F401
    test_a_channel_made_after_a_buffer_was_freed,
    test_a_channel_waits_for_nothing_but_itself,
    test_a_listener_hears_once_of_an_all_reduce,
    test_a_shift_round_the_ring,
    test_a_subgroup_numbers_its_ranks_in_the_order_given,
    test_a_ticket_of_a_subgroup_names_the_rank_of_the_world,
    test_asynchronous_exchanges_keep_their_order,
    test_bits_pass_unchanged,
    test_exchanges_between_collectives,
    test_groups_in_groups,
    test_isend_and_irecv,
    test_messages_arrive_in_the_order_they_were_sent,
    test_tensors_of_every_form,
    test_the_same_name_twice_is_two_channels,
    test_threads_on_channels_of_their_own,
)
from contracts.test_gather import (  # noqa: F401
    test_all_gather_and_gather,
    test_refusals,
    test_scalars,
    test_scatter_and_all_to_all,
    test_sums_of_whole_numbers,
    test_tensors_of_other_forms,
)
from contracts.test_into import (  # noqa: F401
    test_a_single_element_may_have_any_stride,
    test_all_gather_into,
    test_reduce_scatter_into_of_whole_numbers,
    test_what_does_not_fit_is_refused,
)
from contracts.test_transports import (  # noqa: F401
    test_a_mean_is_divided_not_multiplied,
    test_a_tensor_is_reduced_again_and_again,
    test_allocated_buffers_come_and_go,
    test_an_inference_tensor_is_written_or_refused_everywhere,
    test_another_tensor_at_the_address_of_a_freed_one,
    test_inference_mode,
    test_long_buffers,
    test_nothing_is_written_beside_a_slice,
    test_one_two_three_average_to_two,
    test_ops_are_strings_or_members_and_sum_is_the_default,
    test_other_views_of_the_same_memory,
    test_scalars_and_empty_tensors,
    test_short_buffers,
    test_special_values_are_the_same_on_every_rank_and_nan_is_passed_on_by_every_op,
    test_views_of_complex_numbers,
    test_where_the_order_of_summation_changes,
)
from contracts.test_transports import test_tensors_of_every_form as test_sums_of_every_form  # noqa: F401
from murmura.tools.one_gpu import OneGPU
from worlds import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]

# These name the worlds they run in, and sizes: here it is the world that there is.


@pytest.mark.parametrize("length", [1, 1000, 200_001])
def test_hundreds_in_flight_on_two_channels_never_mix(world: World, nccl: OneGPU, length: int) -> None:
    test_concurrency.test_hundreds_in_flight_on_two_channels_never_mix(world, nccl.num_ranks, length)


@pytest.mark.parametrize("length", [5, 150_001])
def test_a_slow_rank_gets_what_was_sent(world: World, nccl: OneGPU, length: int) -> None:
    test_concurrency.test_a_slow_rank_gets_what_was_sent(world, nccl.num_ranks, length, False)


@pytest.mark.parametrize("length", [0, 3, 300_007])
def test_all_pairs_both_ways_in_one_exchange(world: World, nccl: OneGPU, length: int) -> None:
    test_exchange.test_all_pairs_both_ways_in_one_exchange(world, nccl.num_ranks, length)
