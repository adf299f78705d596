"""Schemas of the torch operators: the ABI between the Python API, the backends and ``torch.compile``.

``ops.py`` defines, implements and registers them. Shapes: ``q (total_q, num_heads_q, head_dim)``,
``k (total_k, num_heads_kv, head_dim)``, ``v (total_k, num_heads_kv, head_dim_v)``, ``out (total_q, num_heads_q,
head_dim_v)``, ``lse (total_q, num_heads_q)`` float32 (float64 for float64 inputs), ``max_logits (num_heads_q,)``
(empty when not asked for), ``plan (num_words,)`` int32, a FlexPlan buffer.
"""

NAMESPACE = "magi_core"

# How a mask enters an operator: either a plan, or ranges from which the operator plans (and caches by content).
_MASK = "Tensor? q_ranges, Tensor? k_ranges, Tensor? mask_types, Tensor? plan"
_SCORE = "Tensor? sink, str sink_layout, float softmax_scale, float softcap"

SCHEMAS = {
    # Whole attention: what flex_flash_attn_func calls under torch.compile.
    "flex_attn_fwd": f"(Tensor q, Tensor k, Tensor v, {_MASK}, {_SCORE}, bool allow_overlap, bool return_max_logits, "
    "bool deterministic, int sm_margin, str backend) -> (Tensor out, Tensor lse, Tensor max_logits)",
    "flex_attn_bwd": f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_MASK}, "
    f"{_SCORE}, bool allow_overlap, bool deterministic, int sm_margin, str backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    # Attention over listed keys: indices (total_q, max_topk) int32, ended by -1; k and v have one head.
    "index_attn_fwd": f"(Tensor q, Tensor k, Tensor v, Tensor indices, {_SCORE}, bool return_max_logits) "
    "-> (Tensor out, Tensor lse, Tensor max_logits)",
    "index_attn_bwd": "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor indices, {_SCORE}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    # One stage of a distributed attention. Tiles flagged `first` read no state, tiles flagged `last` write `out`;
    # `out_acc` (float32, or the input dtype when that is float64) carries tiles that span stages.
    "flex_attn_fwd_stage": "(Tensor(a!) out, Tensor(b!) out_acc, Tensor(c!) lse, Tensor(d!)? max_logits, Tensor q, "
    f"Tensor k, Tensor v, Tensor plan, {_SCORE}, int sm_margin, str backend) -> ()",
    # dq_acc is an opaque workspace (new_dq_workspace); dk and dv are stored once in the dtype of the given tensors.
    "flex_attn_bwd_stage": "(Tensor(a!) dq_acc, Tensor(b!) dk, Tensor(c!) dv, Tensor dout, Tensor q, Tensor k, "
    "Tensor v, Tensor lse, Tensor delta, Tensor plan, float softmax_scale, float softcap, bool deterministic, "
    "int sm_margin, str backend) -> ()",
}
