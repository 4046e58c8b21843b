"""Which of torch's own tests of DistributedDataParallel pass with `murmura.DDP`, and why the others do not.

All of them pass with torch's class, on the CPU, with two ranks and Gloo. Torch's other tests of its class are no
measure: they fail or are skipped there.
"""

from __future__ import annotations

_LOGGING = "reads torch's private logging data (_get_ddp_logging_data)"
_REDUCER = "reads private attributes of torch's reducer"
_BUFFER_HOOK = "registers a private hook for buffers (_register_buffer_comm_hook)"
_UNUSED = "expects an error for unused parameters, which are always found here"
_STATIC = "expects an error when a graph that was called static changes; nothing depends on that here"

NOT_PASSING = {
    "test_DistributedDataParallelCPU": "saves the wrapper with torch.save(ddp), which is refused",
    "test_DistributedDataParallelCPU_grad_is_view": "saves the wrapper with torch.save(ddp), which is refused",
    "test_ddp_broadcast_buffer_via_hook": _BUFFER_HOOK,
    "test_ddp_buffer_hook_allreduce": _BUFFER_HOOK,
    "test_ddp_buffer_hook_allreduce_return_future": _BUFFER_HOOK,
    "test_ddp_broadcast_buffers_deprecation_warning": "expects a warning that broadcast_buffers is deprecated",
    "test_ddp_build_debug_param_to_name_mapping": "calls private methods of torch's class",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": "calls private methods of torch's class",
    "test_ddp_comm_hook_logging": _LOGGING,
    "test_ddp_control_flow_different_across_ranks": _REDUCER,
    "test_ddp_control_flow_same_across_ranks": _REDUCER,
    "test_ddp_logging_data_cpu": _LOGGING,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _UNUSED,
    "test_ddp_multiple_nested_unused_params_error": _UNUSED,
    "test_ddp_native_mixed_precision_ignored_params": "asks for mixed_precision=, which is refused",
    "test_ddp_profiling_torch_profiler": "counts Gloo's own profiler events; here they are called murmura:all_reduce",
    "test_ddp_python_error_logged": _LOGGING,
    "test_ddp_sink_noclone": "calls a private method (_set_ddp_sink_clone); outputs are never cloned here",
    "test_ddp_static_graph_nested_types": "wraps a wrapper, which is refused: gradients would be exchanged twice",
    "test_ddp_unused_params_rebuild_buckets_exception": _UNUSED,
    "test_detect_ddp_is_actually_static": _REDUCER,
    "test_different_graph_across_ranks": _LOGGING,
    "test_get_data_parallel_params": "calls a private method (_get_data_parallel_params)",
    "test_invalid_static_graph": _STATIC,
    "test_skip_all_reduce_unused_parameters": _LOGGING,
    "test_static_graph_api_cpu": "calls a private method (_set_static_graph) late, for its error",
}

PASSING = (
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_DistributedSampler_padding",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_broadcast_buffer",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_zero_output_features",
    "test_dump_DDP_relevant_env_vars",
    "test_grads_same_across_ranks_with_no_sync",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
)
