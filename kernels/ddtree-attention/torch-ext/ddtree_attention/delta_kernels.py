"""The Triton kernels of the gated delta rule over a tree: what pairs of nodes give, then what each node corrects.

Nodes are in depth-first preorder and cut into tiles of `TILE`. Of the pairs of tiles only those are touched in which a
node of the first has a descendant in the second: a path crosses few tiles. All numbers are fp32 and all products are
`ieee`: the state is kept in fp32, and TF32 would round each correction that later nodes of a path read to 11 bits.
"""

import triton
import triton.language as tl


@triton.jit
def _related(SubtreeEnds, row_tile, columns, nodes, TILE: tl.constexpr):
    """Whether a node of `columns`, a tile no later than `row_tile`, has a descendant in `row_tile`, or is in it.

    A subtree is an interval, so one that reaches a later tile holds the first node of it.
    """
    ends = tl.load(SubtreeEnds + columns, mask=columns < nodes, other=0)
    return tl.max(ends, 0) > row_tile * TILE


@triton.jit(do_not_specialize=["nodes"])
def delta_products(
    Query,  # float32 (batch, KEY_HEADS, nodes, KEY_DIM)
    Key,  # float32 (batch, KEY_HEADS, nodes, KEY_DIM)
    Beta,  # (batch, nodes, heads)
    Sums,  # float32 (batch, heads, nodes)
    SubtreeEnds,  # (nodes,)
    System,  # float32 (batch, heads, tiles, tiles, TILE, TILE): beta_i D_ij k_i.k_j; on the diagonal its inverse
    Reads,  # float32, likewise: D_ij q_i.k_j
    query_batch_stride,
    query_head_stride,
    query_node_stride,
    key_batch_stride,
    key_head_stride,
    key_node_stride,
    nodes,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_STEP: tl.constexpr,
):
    """Grid: `(batch * heads, tiles, tiles)`; pairs above the diagonal, or without a path, are left unwritten."""
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    sequence = tl.program_id(0).to(tl.int64)
    batch = sequence // HEADS
    head = sequence % HEADS
    row_tile = tl.program_id(1)
    column_tile = tl.program_id(2)
    index = tl.arange(0, TILE)
    rows = row_tile * TILE + index
    columns = column_tile * TILE + index
    if column_tile <= row_tile and _related(SubtreeEnds, row_tile, columns, nodes, TILE):
        rows_ok = rows < nodes
        columns_ok = columns < nodes
        Query += batch * query_batch_stride + head // GROUP * query_head_stride
        Key += batch * key_batch_stride + head // GROUP * key_head_stride
        far_rows = rows.to(tl.int64)[:, None]
        far_columns = columns.to(tl.int64)[None, :]
        between_keys = tl.zeros([TILE, TILE], tl.float32)
        between_reads = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, KEY_DIM, KEY_STEP):
            dims = start + tl.arange(0, KEY_STEP)
            ok = rows_ok[:, None] & (dims < KEY_DIM)[None, :]
            q = tl.load(Query + far_rows * query_node_stride + dims[None, :], mask=ok, other=0.0)
            k = tl.load(Key + far_rows * key_node_stride + dims[None, :], mask=ok, other=0.0)
            before_ok = columns_ok[None, :] & (dims < KEY_DIM)[:, None]
            before = tl.load(Key + far_columns * key_node_stride + dims[:, None], mask=before_ok, other=0.0)
            between_keys += tl.dot(k, before, input_precision="ieee")
            between_reads += tl.dot(q, before, input_precision="ieee")

        ends = tl.load(SubtreeEnds + columns, mask=columns_ok, other=0)
        visible = (columns[None, :] <= rows[:, None]) & (rows[:, None] < ends[None, :])
        sums = Sums + sequence * nodes
        of_rows = tl.load(sums + rows, mask=rows_ok, other=0.0)
        of_columns = tl.load(sums + columns, mask=columns_ok, other=0.0)
        # Outside of paths the differences may be large and positive, so they go before the exponential.
        decay = tl.exp(tl.where(visible, of_rows[:, None] - of_columns[None, :], float("-inf")))
        beta = tl.load(Beta + (batch * nodes + rows) * HEADS + head, mask=rows_ok, other=0.0).to(tl.float32)
        between_keys = between_keys * decay * beta[:, None]
        if column_tile == row_tile:
            between_keys = _inverse(tl.where(columns[None, :] < rows[:, None], between_keys, 0.0), TILE)
        pair = (sequence * tl.num_programs(1) + row_tile) * tl.num_programs(1) + column_tile
        inner = pair * (TILE * TILE) + index[:, None] * TILE + index[None, :]
        tl.store(System + inner, between_keys)
        tl.store(Reads + inner, between_reads * decay)


@triton.jit
def _inverse(lower, TILE: tl.constexpr):
    """Of `1 + lower` for a strictly lower triangular tile, by forward substitution.

    Products of powers would take fewer steps, but with like keys the powers grow to 1e8 and then cancel.
    """
    index = tl.arange(0, TILE)
    inverse = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    for i in range(TILE - 1):
        column = tl.sum(tl.where(index[None, :] == i, lower, 0.0), 1)
        row = tl.sum(tl.where(index[:, None] == i, inverse, 0.0), 0)
        inverse -= column[:, None] * row[None, :]
    return inverse


@triton.jit(do_not_specialize=["nodes"])
def delta_forward(
    Query,  # float32 (batch, KEY_HEADS, nodes, KEY_DIM)
    Key,  # float32 (batch, KEY_HEADS, nodes, KEY_DIM)
    Value,  # (batch, nodes, heads, VALUE_DIM)
    Beta,  # (batch, nodes, heads)
    Sums,  # float32 (batch, heads, nodes)
    State,  # (batch, heads, KEY_DIM, VALUE_DIM)
    SubtreeEnds,  # (nodes,)
    System,  # as [`delta_products`] wrote it
    Reads,
    Corrections,  # float32 (batch, heads, nodes, VALUE_DIM)
    Output,  # (batch, nodes, heads, VALUE_DIM)
    query_batch_stride,
    query_head_stride,
    query_node_stride,
    key_batch_stride,
    key_head_stride,
    key_node_stride,
    value_batch_stride,
    value_head_stride,
    value_node_stride,
    nodes,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_STEP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: `(batch * heads, blocks of values)`. Columns of values are independent; tiles of nodes go one by one."""
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    sequence = tl.program_id(0).to(tl.int64)
    batch = sequence // HEADS
    head = sequence % HEADS
    index = tl.arange(0, TILE)
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    values_ok = (values < VALUE_DIM)[None, :]
    Query += batch * query_batch_stride + head // GROUP * query_head_stride
    Key += batch * key_batch_stride + head // GROUP * key_head_stride
    Value += batch * value_batch_stride + head * value_head_stride
    State += sequence * (KEY_DIM * VALUE_DIM)
    Corrections += sequence * nodes * VALUE_DIM
    tiles = tl.cdiv(nodes, TILE)
    for row_tile in tl.range(0, tiles, num_stages=1):
        rows = row_tile * TILE + index
        rows_ok = rows < nodes
        far_rows = rows.to(tl.int64)[:, None]
        stored = tl.zeros([TILE, BLOCK_V], tl.float32)
        read = tl.zeros([TILE, BLOCK_V], tl.float32)
        for start in tl.range(0, KEY_DIM, KEY_STEP, num_stages=STAGES):
            dims = start + tl.arange(0, KEY_STEP)
            ok = rows_ok[:, None] & (dims < KEY_DIM)[None, :]
            q = tl.load(Query + far_rows * query_node_stride + dims[None, :], mask=ok, other=0.0)
            k = tl.load(Key + far_rows * key_node_stride + dims[None, :], mask=ok, other=0.0)
            state_ok = (dims < KEY_DIM)[:, None] & values_ok
            state = tl.load(State + dims[:, None] * VALUE_DIM + values[None, :], mask=state_ok, other=0.0)
            stored += tl.dot(k, state.to(tl.float32), input_precision="ieee")
            read += tl.dot(q, state.to(tl.float32), input_precision="ieee")

        kept = tl.exp(tl.load(Sums + sequence * nodes + rows, mask=rows_ok, other=0.0))[:, None]
        of_rows = (batch * nodes + rows) * HEADS + head
        beta = tl.load(Beta + of_rows, mask=rows_ok, other=0.0).to(tl.float32)[:, None]
        ok = rows_ok[:, None] & values_ok
        v = tl.load(Value + far_rows * value_node_stride + values[None, :], mask=ok, other=0.0).to(tl.float32)
        wrong = beta * (v - kept * stored)
        read = kept * read
        pair = (sequence * tiles + row_tile) * tiles
        for column_tile in tl.range(0, row_tile, num_stages=1):
            columns = column_tile * TILE + index
            if _related(SubtreeEnds, row_tile, columns, nodes, TILE):
                inner = (pair + column_tile) * (TILE * TILE) + index[:, None] * TILE + index[None, :]
                # Tiles before this one are full: only a tree's last tile is ragged.
                at = Corrections + columns.to(tl.int64)[:, None] * VALUE_DIM + values[None, :]
                u = tl.load(at, mask=values_ok, other=0.0)
                wrong -= tl.dot(tl.load(System + inner), u, input_precision="ieee")
                read += tl.dot(tl.load(Reads + inner), u, input_precision="ieee")
        inner = (pair + row_tile) * (TILE * TILE) + index[:, None] * TILE + index[None, :]
        u = tl.dot(tl.load(System + inner), wrong, input_precision="ieee")
        read += tl.dot(tl.load(Reads + inner), u, input_precision="ieee")
        tl.store(Corrections + far_rows * VALUE_DIM + values[None, :], u, mask=ok)
        tl.store(Output + of_rows[:, None] * VALUE_DIM + values[None, :], read.to(Output.dtype.element_ty), mask=ok)
        # Later tiles read these corrections with other threads.
        tl.debug_barrier()
