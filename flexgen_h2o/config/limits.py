"""Sizes of blocks and buffers that several packages share: allocated by the engine, planned for.

kernels/abi.py writes the constants of `CPP_CONSTANTS` into the header of the C++ kernels. The
module imports nothing, because setup.py runs it by its path.
"""

ROW_BLOCK = 2048
"""Rows that a decoder layer computes at once in row-wise operations (norms, projections, MLP). It
bounds the MLP's scratch memory; matmuls reach full speed with far fewer rows."""

CHUNK_ROWS = {"cpu": ROW_BLOCK, "cuda": 8 * ROW_BLOCK}
"""Rows of a prefill that go through a layer together, by device type. Their scratch memory fits in
the caches of a CPU, and matmuls run at full speed. More rows would only cost memory."""

DRAFT_CHUNK = 256
"""Tokens of a prompt that a draft model computes together."""

MAX_MODEL_LEN = 4096
"""Default number of tokens of a prompt and its continuation in sessions and servers."""

LOGIT_ROWS = 512
"""Rows whose logits are computed together, because a vocabulary is large."""

WEIGHT_BUFFERS = 2
"""Staging buffers of weights: one in use, one being filled."""

SHARDS_PER_LAYER = 8
"""Approximate number of row shards of a decoder layer whose weights are streamed from disk."""

MIN_SHARD_BYTES = 1 << 20
"""Lower limit of the bytes of a row shard: enough to keep the disk's threads busy."""

SHARD_BUFFERS = 4
"""Staging buffers of row shards: one used by a matmul, three being filled."""

HIDDEN_BUFFERS = 3
"""Staging buffers of hidden states: one being stored, one in use, one being loaded."""

CACHE_BUFFERS = 3
"""Staging buffers of a cache: one in use, one being fetched, one being stored."""

STARTED_BATCHES = 2
"""Batches whose host attention may be in flight: the current one and the next."""

WRITE_BACK_TOKENS = 16
"""Tokens whose changes to a cache on disk are collected in memory and then written in bulk."""

CACHE_GROWTH = 64
"""Slots by which a growing cache grows: a multiple of `WRITE_BACK_TOKENS`, because growth rewrites
the backing store."""

PAGE = 4096
"""Alignment of direct reads and writes (O_DIRECT), in bytes."""

HOT_SET_FACTOR = 2
"""Size of the hot set of a cache on disk, in multiples of the tokens that a step attends to."""

NEWEST_PAGES = 2
"""Pages of a cache on disk whose tokens, the newest, are also in memory: one is being filled, one
being written."""

RECALL_GROUPS = 2
"""Maximum number of groups of a batch that recall one after the other: a group attends while the
tokens of the next one are read."""

MAX_READ_GAP = 32 << 10
"""Maximum gap in bytes between two pages of a cache that are read by one request. A second request
would take a disk about as long as reading the gap."""

READ_BYTES = 256 << 10
"""Maximum bytes of a request that reads pages of a cache, unless a page is larger."""

INDEX_TILE = 16
"""Tokens that are interleaved in the key index: the lanes of the widest vectors."""

MEAN_SHIFT = 3
"""The newest weight of a token contributes 2^-3 to the running mean that ranks the hot set."""

SHARED_PREFIX = 16
"""Minimum common prefix of a batch's prompts that is computed once: with a shorter one, separate
attention of each prompt's rest costs more."""

UNPACKED_BYTES = 64 << 20
"""Maximum bytes of a quantized matrix that a GPU dequantizes at a time before a matmul."""

EMPTY = 2**31 - 1
"""Position of an empty slot: later than all others, so that it is never evicted."""

GROUP_SIZE = 64
"""Default group size of quantization: elements that share a scale and a zero point."""

MATRIX_TILE = 16
"""Outputs of a quantized matrix that are interleaved: the lanes of a vector."""

MXFP4_GROUP = 32
"""Inputs that share a scale in MXFP4."""

MATMUL_ROWS, MATMUL_OUTPUTS = 256, 2 * MATRIX_TILE
"""Blocking of quantized matmuls: input rows per weight block in the L1 cache, and outputs that a
thread accumulates together in float32."""

TILED_OUTPUTS, TILED_INPUTS, TILED_ROWS = 128, 2048, 1024
"""Blocking of AMX matmuls with many rows: outputs and inputs of the weight panel in the L2 cache,
and rows whose partial sums a thread keeps.
"""

MATMUL_DEPTH = 128
"""Inputs per block of float32 matmuls, which dequantize a panel of this depth."""

SKINNY_ROWS = 128
"""Maximum rows of `linear_skinny`: with more, `linear_tiled` is as fast with AMX, and PyTorch is
faster without."""

EXPERT_ROWS = 64
"""Maximum tokens per expert in one call that computes several experts."""

EXPERT_ROUND = 1024
"""(token, expert) pairs that one call computes before it sums them."""

QUERY_LANES = 64
"""Maximum queries that a thread attends with at once, holding the attention weights of each. With
AMX it may be twice as many, with the weights of some keys only."""

BLOCK_BYTES = 32 << 20
"""Size of a block's logits where PyTorch's matmuls attend within prompts. A few buffers have this
size, so memory is linear in the tokens."""

SLOT_TILE = 64
"""Cache slots whose keys or values a thread dequantizes at once."""

PART_SLOTS = 256
"""Slots of a split of decode attention. Splits are combined in order."""

MIN_TASKS = 64
"""Minimum number of tasks into which few heads are split, for any number of threads; each task has
its own partial results."""

CPP_CONSTANTS = ("EMPTY", "MATRIX_TILE", "MXFP4_GROUP", "MATMUL_ROWS", "MATMUL_OUTPUTS",
                 "MATMUL_DEPTH", "SKINNY_ROWS", "QUERY_LANES", "SLOT_TILE", "PART_SLOTS",
                 "MIN_TASKS", "INDEX_TILE", "MEAN_SHIFT", "EXPERT_ROUND", "TILED_ROWS",
                 "TILED_OUTPUTS", "TILED_INPUTS")
"""Constants that the C++ kernels are compiled with."""
