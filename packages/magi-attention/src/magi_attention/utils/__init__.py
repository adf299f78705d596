"""Helpers around attention: the process group, devices, lists, masks, dtypes, seeds, costs, logging, profiling."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .costs import get_a2a_corr_factor as get_a2a_corr_factor
    from .costs import get_calc_cost_factor as get_calc_cost_factor
    from .costs import get_comm_cost_factor as get_comm_cost_factor
    from .device import get_num_sms as get_num_sms
    from .device import is_ampere as is_ampere
    from .device import is_blackwell as is_blackwell
    from .device import is_hopper as is_hopper
    from .dist_env import clearup_dist_env as clearup_dist_env
    from .dist_env import setup_dist_env as setup_dist_env
    from .dtypes import fp_dtype_bits as fp_dtype_bits
    from .dtypes import is_fp_dtype_at_least as is_fp_dtype_at_least
    from .dtypes import max_fp_dtype as max_fp_dtype
    from .dtypes import to_higher_fp_dtype as to_higher_fp_dtype
    from .dtypes import to_triton_dtype as to_triton_dtype
    from .log import rprint_rank as rprint_rank
    from .log import write_rank as write_rank
    from .masks import make_attn_mask_from_ffa_args as make_attn_mask_from_ffa_args
    from .masks import make_slice_mask_from_ffa_attn_type as make_slice_mask_from_ffa_attn_type
    from .masks import vis_attn_mask as vis_attn_mask
    from .masks import vis_matrix as vis_matrix
    from .seeds import is_same_device_mesh as is_same_device_mesh
    from .seeds import is_same_process_group as is_same_process_group
    from .seeds import set_random_seed as set_random_seed
    from .seeds import str2seed as str2seed
    from .seeds import sync_rng as sync_rng
    from .sequences import argmax as argmax
    from .sequences import argmin as argmin
    from .sequences import argsort as argsort
    from .sequences import ceil_div as ceil_div
    from .sequences import cu_seqlens2seqlens as cu_seqlens2seqlens
    from .sequences import find_factors_in_range as find_factors_in_range
    from .sequences import flatten_nested_list as flatten_nested_list
    from .sequences import get_factors as get_factors
    from .sequences import is_list_type_all as is_list_type_all
    from .sequences import is_list_value_all as is_list_value_all
    from .sequences import is_list_value_any as is_list_value_any
    from .sequences import pad_and_pack_tensors as pad_and_pack_tensors
    from .sequences import perm_idxs2unperm_idxs as perm_idxs2unperm_idxs
    from .sequences import seqlens2cu_seqlens as seqlens2cu_seqlens
    from .sequences import transpose_matrix as transpose_matrix
    from .sequences import wrap_to_list as wrap_to_list

_MODULES = {
    ".costs": ("get_a2a_corr_factor", "get_calc_cost_factor", "get_comm_cost_factor"),
    ".device": ("get_num_sms", "is_ampere", "is_blackwell", "is_hopper"),
    ".dist_env": ("clearup_dist_env", "setup_dist_env"),
    ".dtypes": ("fp_dtype_bits", "is_fp_dtype_at_least", "max_fp_dtype", "to_higher_fp_dtype", "to_triton_dtype"),
    ".log": ("rprint_rank", "write_rank"),
    ".masks": (
        "make_attn_mask_from_ffa_args",
        "make_slice_mask_from_ffa_attn_type",
        "vis_attn_mask",
        "vis_matrix",
    ),
    ".seeds": ("is_same_device_mesh", "is_same_process_group", "set_random_seed", "str2seed", "sync_rng"),
    ".sequences": (
        "argmax",
        "argmin",
        "argsort",
        "ceil_div",
        "cu_seqlens2seqlens",
        "find_factors_in_range",
        "flatten_nested_list",
        "get_factors",
        "is_list_type_all",
        "is_list_value_all",
        "is_list_value_any",
        "pad_and_pack_tensors",
        "perm_idxs2unperm_idxs",
        "seqlens2cu_seqlens",
        "transpose_matrix",
        "wrap_to_list",
    ),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_LAZY]

__getattr__, __dir__ = lazy_names(__name__, _LAZY)
