"""The KV cache of a block of GPU batches. Read `kv_cache` first.

==================  ==================================================================
`kv_cache`          blocks, loads and stores: the interface to the engine
`token_attention`   attention from new tokens: drafts, prefetch, capture and replay
`prefill`           attention within prompts, and the cut to their budgets
`chunked_prefill`   the same by chunks, with eviction after each
`retrieval`         recall: quantized key indices, and attention to selected tokens
`eviction_state`    eviction states, step metadata, migration of continued sequences
`layout`            sizes: bytes of a slot, slots of a layer
`recurrent_state`   the states of recurrent layers, over the same tiers
`tiers`             tiers of the cache that are resident, or fetched and written back
`hot_set`           selective fetch from host memory by a GPU, and the hot set
`disk_recall`       selective fetch from disk, and the choice of tiers
`alternatives`      caches with the same interface: simulated, probed, uncached
==================  ==================================================================
"""
