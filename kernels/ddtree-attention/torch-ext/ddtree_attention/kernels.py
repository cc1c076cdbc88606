"""The Triton kernels: attention of a tree's nodes, and merging what several programs found of one row.

A program serves `BLOCK_M` rows of one sequence and one key-value head. A row is a node and one of the query heads that
share the key-value head, node after node: row `node * GROUP + head`. Nodes are in depth-first preorder, so "column is
row's ancestor, or row" is `column <= row < subtree_ends[column]`, and all that the program's nodes can see of the tree
is its own nodes, which lie side by side, and the ancestors of its first node. Scores are kept in base 2.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    if UPCAST:  # The interpreter multiplies the bits of bf16, not the numbers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _read(pointers, rows_ok, dims_ok, MASK_ROWS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """A tile of keys or values; what may not be read is zero, never the memory's own content."""
    if MASK_ROWS and MASK_DIMS:
        return tl.load(pointers, mask=rows_ok & dims_ok, other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=rows_ok, other=0.0)
    elif MASK_DIMS:
        return tl.load(pointers, mask=dims_ok, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _attend(
    acc,
    total,
    top,
    q,
    key_pointers,
    value_pointers,
    columns_ok,
    visible,
    key_dims_ok,
    value_dims_ok,
    scale,
    softcap,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASK_KEY_DIMS: tl.constexpr,
    MASK_VALUE_DIMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of columns into the running maximum `top`, sum `total` and weighted values `acc`."""
    k = _read(key_pointers, columns_ok[None, :], key_dims_ok[:, None], MASKED, MASK_KEY_DIMS)
    scores = _dot(q, k, UPCAST)
    if HAS_SOFTCAP:
        # tanh x = 1 - 2 / (exp 2x + 1), which is right where exp runs over to infinity or under to 0.
        growth = tl.exp2(scores * (2.0 * LOG2_E * scale / softcap))
        scores = softcap * LOG2_E - (2.0 * LOG2_E * softcap) / (growth + 1.0)
    else:
        scores = scores * (scale * LOG2_E)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet has no maximum, and -inf - -inf is not a number.
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    v = _read(value_pointers, columns_ok[:, None], value_dims_ok[None, :], MASKED, MASK_VALUE_DIMS)
    acc = acc * shrink[:, None] + _dot(weights.to(v.dtype), v, UPCAST)
    return acc, total * shrink + tl.sum(weights, 1), new_top


@triton.jit(do_not_specialize=["max_nodes", "ancestor_width", "window"])
def tree_attention_forward(
    Query,  # (batch, heads, max_nodes, KEY_DIM)
    Key,  # (batch, KEY_VALUE_HEADS, slots, KEY_DIM)
    Value,  # (batch, KEY_VALUE_HEADS, slots, VALUE_DIM)
    Depths,  # int32 (batch, max_nodes)
    SubtreeEnds,  # int32 (batch, max_nodes)
    Ancestors,  # int32 (batch, max_nodes, ancestor_width): those of a node from the root down, then -1
    Start,  # int32 (batch,): first readable slot of the prefix
    Prefix,  # int32 (batch,): slots before the tree's, which lies in `[prefix, prefix + nodes)`
    Nodes,  # int32 (batch,)
    Output,  # (splits, batch, max_nodes, heads, VALUE_DIM); float32 where a merge follows
    LogSum,  # float32 (splits, batch, max_nodes, heads): base 2, for the merge
    query_batch_stride,
    query_head_stride,
    query_node_stride,
    key_batch_stride,
    key_head_stride,
    key_slot_stride,
    value_batch_stride,
    value_head_stride,
    value_slot_stride,
    max_nodes,
    ancestor_width,
    window,
    scale,
    softcap,
    KEY_VALUE_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTIAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: `(tiles of rows, batch * KEY_VALUE_HEADS, splits)`, from sizes the host knows; lengths are read here."""
    batch = (tl.program_id(1) // KEY_VALUE_HEADS).to(tl.int64)
    key_value_head = tl.program_id(1) % KEY_VALUE_HEADS
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    nodes = tl.load(Nodes + batch)
    prefix = tl.load(Prefix + batch)
    start = tl.load(Start + batch)
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    node = rows // GROUP
    row_ok = node < nodes
    key_dims = tl.arange(0, KEY_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    key_dims_ok = key_dims < KEY_DIM
    value_dims_ok = value_dims < VALUE_DIM
    columns = tl.arange(0, BLOCK_N)
    MASK_KEY_DIMS: tl.constexpr = KEY_DIM != KEY_BLOCK
    MASK_VALUE_DIMS: tl.constexpr = VALUE_DIM != VALUE_BLOCK

    first_node = first_row // GROUP
    first_head = (key_value_head * GROUP).to(tl.int64)
    Query += batch * query_batch_stride + first_head * query_head_stride + first_node.to(tl.int64) * query_node_stride
    Key += batch * key_batch_stride + key_value_head.to(tl.int64) * key_head_stride
    Value += batch * value_batch_stride + key_value_head.to(tl.int64) * value_head_stride
    Depths += batch * max_nodes
    SubtreeEnds += batch * max_nodes
    Ancestors += batch * max_nodes * ancestor_width
    # Within a program 32 bits reach everything; 64 cost twice the registers.
    query_rows = (node - first_node) * query_node_stride + (rows % GROUP) * query_head_stride
    q = tl.load(
        Query + query_rows[:, None] + key_dims[None, :], mask=row_ok[:, None] & key_dims_ok[None, :], other=0.0
    )
    key_inner = columns[None, :] * key_slot_stride + key_dims[:, None]
    value_inner = columns[:, None] * value_slot_stride + value_dims[None, :]

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    if HAS_WINDOW:
        depth = tl.load(Depths + node, mask=row_ok, other=0)

    # The prefix in tiles that end where it ends: only the first ones are ragged, and the others need no mask.
    low = start
    if HAS_WINDOW:
        low = tl.maximum(start, prefix - window + 1)
    tiles = tl.cdiv(tl.maximum(prefix - low, 0), BLOCK_N)
    origin = prefix - tiles * BLOCK_N
    ragged = tl.minimum(tiles, (origin < low).to(tl.int32))
    if HAS_WINDOW:
        # A node at depth d sees d slots less of the window.
        ragged = tl.minimum(tiles, tl.cdiv(low - origin + ancestor_width, BLOCK_N))
    per_split = tl.cdiv(tiles, splits)
    begin = split * per_split
    end_tile = tl.minimum(begin + per_split, tiles)

    # Tiles with a mask: the ragged ones, then the tree, gathered: the first node's ancestors and the tile's own nodes.
    # The last split has the fewest tiles of the prefix, so it takes the tree.
    masked = tl.maximum(tl.minimum(end_tile, ragged) - begin, 0)
    ancestors = 0
    gathered = 0
    if (split == splits - 1) & (first_node < nodes):
        ancestors = tl.load(Depths + first_node)
        gathered = ancestors + tl.minimum((first_row + BLOCK_M - 1) // GROUP + 1, nodes) - first_node
    for tile in tl.range(0, masked + tl.cdiv(gathered, BLOCK_N), num_stages=1):
        # A place from 0 on is one of the gathered nodes, one before it is a slot of the prefix.
        in_prefix = tile < masked
        place = (tile - masked) * BLOCK_N + columns
        ancestor_ok = (place >= 0) & (place < ancestors)
        ancestor = tl.load(Ancestors + first_node * ancestor_width + place, mask=ancestor_ok, other=0)
        other = tl.where(ancestor_ok, ancestor, first_node + place - ancestors)
        slot = tl.where(in_prefix, origin + (begin + tile) * BLOCK_N + columns, prefix + other)
        slot_ok = tl.where(in_prefix, slot >= low, place < gathered)
        node_ok = slot_ok & (slot >= prefix)
        # A slot of the prefix is before every node, and its subtree has no end.
        end = tl.load(SubtreeEnds + other, mask=node_ok, other=0x7FFFFFFF)
        end = tl.where(slot_ok, end, 0)
        visible = (slot[None, :] <= (prefix + node)[:, None]) & (node[:, None] < end[None, :])
        if HAS_WINDOW:
            other_depth = tl.load(Depths + other, mask=node_ok, other=0)
            leaves = tl.where(node_ok, other_depth, slot - prefix) + window
            visible = visible & (depth[:, None] < leaves[None, :])
        at = tl.where(slot_ok, slot, prefix).to(tl.int64)
        acc, total, top = _attend(
            acc,
            total,
            top,
            q,
            Key + at[None, :] * key_slot_stride + key_dims[:, None],
            Value + at[:, None] * value_slot_stride + value_dims[None, :],
            slot_ok,
            visible,
            key_dims_ok,
            value_dims_ok,
            scale,
            softcap,
            True,
            HAS_SOFTCAP,
            MASK_KEY_DIMS,
            MASK_VALUE_DIMS,
            UPCAST,
        )
    for tile in range(tl.maximum(begin, ragged), end_tile):
        first = (origin + tile * BLOCK_N).to(tl.int64)
        acc, total, top = _attend(
            acc,
            total,
            top,
            q,
            Key + first * key_slot_stride + key_inner,
            Value + first * value_slot_stride + value_inner,
            key_dims_ok,
            None,
            key_dims_ok,
            value_dims_ok,
            scale,
            softcap,
            False,
            HAS_SOFTCAP,
            MASK_KEY_DIMS,
            MASK_VALUE_DIMS,
            UPCAST,
        )

    divisor = tl.where(total == 0.0, 1.0, total)
    acc = acc / divisor[:, None]
    HEADS: tl.constexpr = KEY_VALUE_HEADS * GROUP
    sequence = split * (tl.num_programs(1) // KEY_VALUE_HEADS) + batch
    first_output = (sequence * max_nodes + first_node) * HEADS + first_head
    # Rows are worked out anew from a zero the compiler cannot see through: kept alive from the queries' load to here,
    # they took the loop's registers.
    rows = first_row + tl.load(Nodes + batch, volatile=True) - nodes + tl.arange(0, BLOCK_M)
    node = rows // GROUP
    output_rows = (node - first_node) * HEADS + rows % GROUP
    stored = node < max_nodes
    # A row without a node is written too, with zeros.
    row_ok = node < nodes
    found = tl.where(row_ok[:, None], acc, 0.0).to(Output.dtype.element_ty)
    pointers = Output + first_output * VALUE_DIM + output_rows[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(pointers, found, mask=stored[:, None] & value_dims_ok[None, :])
    if PARTIAL:
        log_sum = tl.where(row_ok & (total > 0.0), top + tl.log2(divisor), float("-inf"))
        tl.store(LogSum + first_output + output_rows, log_sum, mask=stored)


@triton.jit(do_not_specialize=["rows"])
def tree_attention_merge(
    Partial,  # float32 (splits, rows, VALUE_DIM); a row is a sequence, a node and a head
    LogSum,  # float32 (splits, rows)
    Sinks,  # (HEADS,)
    Output,  # (rows, VALUE_DIM)
    rows,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid: `(tiles of rows,)`. A split that saw nothing has weight 0; a sink takes weight once, here."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ok = row < rows
    dims = tl.arange(0, VALUE_BLOCK)
    both_ok = ok[:, None] & (dims < VALUE_DIM)[None, :]
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for split in range(SPLITS):
        top = tl.maximum(top, tl.load(LogSum + split * rows.to(tl.int64) + row, mask=ok, other=float("-inf")))
    # A row without a node saw nothing in any split: its output is zero, sink or not.
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(Sinks + row % HEADS, mask=ok, other=0.0).to(tl.float32) * LOG2_E
        base = tl.maximum(base, sink)
        total += tl.exp2(sink - base)
    acc = tl.zeros([BLOCK_ROWS, VALUE_BLOCK], tl.float32)
    for split in range(SPLITS):
        at = split * rows.to(tl.int64) + row
        weight = tl.exp2(tl.load(LogSum + at, mask=ok, other=float("-inf")) - base)
        total += weight
        part = tl.load(Partial + at[:, None] * VALUE_DIM + dims[None, :], mask=both_ok, other=0.0)
        acc += weight[:, None] * part
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(Output + row[:, None] * VALUE_DIM + dims[None, :], acc.to(Output.dtype.element_ty), mask=both_ok)
