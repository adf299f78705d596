#include "launch/sm90/attn_fwd.cuh"

static magi::attn::FwdRegistration<magi::attn::FwdTraits<__half, 64, 64, magi::attn::Softcapped>> const registration;
