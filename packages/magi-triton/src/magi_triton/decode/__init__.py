"""Few queries against many keys: the kernels behind split_kv, paged and diffkv."""
