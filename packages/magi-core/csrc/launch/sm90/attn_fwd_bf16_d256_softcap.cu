#include "launch/sm90/attn_fwd.cuh"

static magi::attn::FwdRegistration<magi::attn::FwdTraits<__nv_bfloat16, 256, 256, magi::attn::Softcapped>> const
    registration;
