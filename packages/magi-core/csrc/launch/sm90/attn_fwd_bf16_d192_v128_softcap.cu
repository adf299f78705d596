#include "launch/sm90/attn_fwd.cuh"

static magi::attn::FwdRegistration<magi::attn::FwdTraits<__nv_bfloat16, 192, 128, magi::attn::Softcapped>> const
    registration;
