"""Sizes of blocks and buffers that several rooms go by: what the engine makes, the plan counts.

The C++ kernels are compiled with those of `KERNELS`: kernels/abi.py writes them into their header.
The module imports nothing, since setup.py runs it by its path.
"""

ROW_BLOCK = 2048
"""Rows that a decoder layer takes at once through whatever is row by row (norms, projections, MLP).
It bounds the MLP's workspace, and is far more than a matrix product needs to run at full speed."""

CHUNK_ROWS = {"cpu": ROW_BLOCK, "cuda": 8 * ROW_BLOCK}
"""Rows of a prefill that go through a layer together, by the kind of device. The temporaries of so
many rows fit near the caches of a CPU and keep its products busy; more would only cost memory."""

LOGIT_ROWS = 512
"""Rows that get logits together: a vocabulary is wide."""

WEIGHT_BUFFERS = 2
"""Staging buffers of weights: one computed with, one being filled."""

SHARDS_PER_LAYER = 8
"""Approximate number of row shards of a decoder layer whose weights are streamed from disk."""

MIN_SHARD_BYTES = 1 << 20
"""Lower limit of the bytes of a row shard: enough to keep the disk's threads busy."""

SHARD_BUFFERS = 4
"""Staging buffers of row shards: one used by a matmul, three being filled."""

HIDDEN_BUFFERS = 3
"""Staging buffers of hidden states: one being stored, one computed with, one being loaded."""

CACHE_BUFFERS = 3
"""Staging buffers of a cache: one computed with, one fetched, and one being stored and then
fetched into."""

STARTED_BATCHES = 2
"""Batches whose attention on the host may be under way: the one computed, and the next."""

WRITE_BACK_TOKENS = 16
"""Tokens whose changes to a cache on disk wait in memory before the whole is written in bulk."""

CACHE_GROWTH = 64
"""Slots that a growing cache is given at a time: a multiple of `WRITE_BACK_TOKENS`, for a backing
store is rewritten then."""

PAGE = 4096
"""Bytes to which reads and writes of a disk that pass the page cache by are aligned."""

HOT_SET_FACTOR = 2
"""Times the tokens that a step attends to by recall: so many stay in memory of a cache on disk."""

NEWEST_RECORDS = 2
"""Records of the newest tokens that memory holds of such a cache: one fills up, and one may be on
its way to disk."""

RECALL_GROUPS = 2
"""Groups of a batch's sequences at most that recall from such a cache one after the other: the next
ones' tokens come while attention goes over these."""

MAX_READ_GAP = 32 << 10
"""Bytes between two records of such a cache that are read with them: a disk takes about as long for
one more request, where it has many at a time."""

READ_BYTES = 256 << 10
"""Bytes that one request reads of such a cache, at most, unless a record has more."""

INDEX_TILE = 16
"""Tokens of the index of keys whose numbers lie side by side: the lanes of the widest vectors."""

MEAN_SHIFT = 3
"""The last weight of a token makes 2^-3 of the running mean by which fast memory keeps it."""

SHARED_PREFIX = 16
"""Tokens with which prompts of a batch have to begin alike for these to be computed once: with
fewer, attending from each prompt's rest by itself costs more."""

UNPACKED_BYTES = 64 << 20
"""The most bytes of a quantized matrix that a GPU unpacks at a time before a product."""

EMPTY = 2**31 - 1
"""The position of a slot that holds no token: later than all, so it is never a victim."""

GROUP_SIZE = 64
"""Default group size of quantization: elements that share a scale and a zero point."""

MATRIX_TILE = 16
"""Outputs of a quantized matrix that lie together: the lanes of a vector."""

MXFP4_GROUP = 32
"""Inputs that share a scale in MXFP4."""

PRODUCT_ROWS, PRODUCT_OUTPUTS = 256, 2 * MATRIX_TILE
"""Rows of the input that meet a block of a quantized matrix while it is in a CPU's nearest cache,
and the outputs that are computed together: each thread holds so many in float32."""

TILED_OUTPUTS, TILED_INPUTS, TILED_ROWS = 128, 2048, 1024
"""The outputs and inputs of a matrix that are operands of AMX tiles at a time, for many rows. Each
thread holds them in its second-level cache, and where there are more inputs sums of so many rows.
"""

PRODUCT_DEPTH = 128
"""Inputs that products in float32 take at once: a strip of weights has so many as floats."""

SKINNY_ROWS = 128
"""The most rows of `linear_skinny`: for more, `linear_tiled` is as fast with AMX, and PyTorch
faster without."""

EXPERT_ROWS = 64
"""The most tokens of one of several experts that one call computes."""

EXPERT_ROUND = 1024
"""Choices of experts, by tokens of few, that one call computes before it adds them up."""

QUERY_LANES = 64
"""The most queries that a thread attends with at once, of each of which it holds all weights. With
AMX it may be twice as many, of some of which it holds the weights of some keys."""

SLOT_TILE = 64
"""Slots of a cache whose keys or values a thread expands at once."""

FEWEST_TASKS = 64
"""So many tasks are made out of few heads, whatever the number of threads; each has results of its
own."""

KERNELS = ("EMPTY", "MATRIX_TILE", "MXFP4_GROUP", "PRODUCT_ROWS", "PRODUCT_OUTPUTS",
           "PRODUCT_DEPTH", "SKINNY_ROWS", "QUERY_LANES", "SLOT_TILE", "FEWEST_TASKS", "INDEX_TILE",
           "MEAN_SHIFT", "EXPERT_ROUND", "TILED_ROWS", "TILED_OUTPUTS", "TILED_INPUTS")
"""What the C++ kernels are compiled with."""
