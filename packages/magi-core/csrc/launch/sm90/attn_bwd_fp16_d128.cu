#include "launch/sm90/attn_bwd.cuh"

static magi::attn::BwdRegistration<magi::attn::BwdTraits<__half, 128, 128, magi::attn::Scaled>> const registration;
