"""Which blocks hold which prefixes.

A tree of full blocks: a node is one block's worth of tokens after the tokens of its parent. Nodes
are found by a chained sha256 and then compared by content, so that no collision can give a request
another one's keys and values.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Optional

from runtime.scheduling.cache_layout import CacheGroup, CacheLayout

if TYPE_CHECKING:
    from array import array

Hash = Callable[[bytes], bytes]


def sha256_digest(data: bytes) -> bytes:
    return sha256(data).digest()


class Node:
    """One full block of tokens after its parent's, and the blocks that hold it."""

    __slots__ = ("blocks", "digest", "num_blocks", "num_children", "parent", "tokens")

    def __init__(
        self, parent: Optional["Node"], digest: bytes, tokens: bytes, num_groups: int
    ) -> None:
        self.parent = parent  # None for the root of a salt
        self.digest = digest
        self.tokens = tokens
        self.num_children = 0
        self.num_blocks = 0
        self.blocks: list[int | None] = [None] * num_groups  # by group


class StoredNode(NamedTuple):
    """A node as it is kept elsewhere."""

    parent: int | None  # index of its parent; None: the root of `salt`
    salt: str
    tokens: bytes
    digest: bytes
    blocks: tuple[int | None, ...]  # by group


class PrefixCache:
    """The tree. It knows which blocks hold what, not who uses them.

    `root` is a secret of the process: whoever doesn't know it can't make hashes collide.
    """

    def __init__(self, layout: CacheLayout, *, root: bytes, hash_fn: Hash = sha256_digest) -> None:
        self._layout = layout
        self._block_size = layout.block_size
        self._num_groups = len(layout.groups)
        self._full_groups = [
            index for index, group in enumerate(layout.groups) if not group.is_local
        ]
        self._secret = root
        self._hash = hash_fn
        self._roots: dict[bytes, Node] = {}  # by cache salt
        self._nodes: dict[bytes, Node] = {}
        self._homes: dict[int, Node] = {}  # by block

    @property
    def homes(self) -> Iterator[int]:
        """The blocks that hold a prefix."""
        return iter(self._homes)

    def hash_blocks(
        self, hashes: list[bytes], token_ids: "array[int]", count: int, salt: str
    ) -> None:
        """Appends what `hashes` lacks of the hashes of the first `count` full blocks."""
        if count <= len(hashes):
            return
        digest = hashes[-1] if hashes else self._root_digest(salt)
        hash_fn, size = self._hash, self._block_size
        data = token_ids[len(hashes) * size : count * size].tobytes()
        step = size * token_ids.itemsize
        for start in range(0, len(data), step):
            digest = hash_fn(digest + data[start : start + step])
            hashes.append(digest)

    def find(
        self, hashes: Sequence[bytes], token_ids: "array[int]", count: int, salt: str
    ) -> list[Node]:
        """The nodes of the longest prefix that is there, of at most `count` full blocks.

        That is all its blocks of full attention, and of the others what the next token sees: of
        chunks none, where the prefix ends with one.
        """
        nodes = self._find_chain(hashes, token_ids, count, salt)
        return nodes[: self._reachable(nodes)]

    def extend(
        self,
        nodes: list[Node],
        hashes: Sequence[bytes],
        token_ids: "array[int]",
        count: int,
        salt: str,
        tables: Sequence[Sequence[int]],
        firsts: Sequence[int],
    ) -> list[int]:
        """Makes a sequence's first `count` full blocks findable; `nodes` are those that are.

        `tables` are its blocks by group, from the places `firsts` on. Returns the blocks that have
        become a node's: where a node has one already, the sequence's own is a copy that nobody else
        will share. Stops where a hash stands for other content: nothing after it could be found.
        """
        # Nodes of which the sequence held copies may have gone with the originals.
        while nodes and not self.is_alive(nodes[-1]):
            nodes.pop()
        start = len(nodes)
        parent = nodes[-1] if nodes else self._root(salt)
        data = token_ids[start * self._block_size : count * self._block_size].tobytes()
        step = self._block_size * token_ids.itemsize
        groups = list(enumerate(zip(tables, firsts, strict=True)))
        adopted: list[int] = []
        for place in range(start, count):
            tokens = data[(place - start) * step : (place - start + 1) * step]
            node = self._nodes.get(hashes[place])
            if node is None:
                node = self._nodes[hashes[place]] = Node(
                    parent, hashes[place], tokens, self._num_groups
                )
                parent.num_children += 1
            elif node.parent is not parent or node.tokens != tokens:
                break
            for group, (table, first) in groups:
                if place >= first and node.blocks[group] is None:
                    block = node.blocks[group] = table[place - first]
                    node.num_blocks += 1
                    self._homes[block] = node
                    adopted.append(block)
            nodes.append(node)
            parent = node
        self._prune(parent)
        return adopted

    def is_alive(self, node: Node) -> bool:
        """Whether the node can still be found."""
        return self._nodes.get(node.digest) is node

    def evict(self, blocks: Iterable[int]) -> None:
        """Forgets what these blocks hold."""
        for block in blocks:
            node = self._homes.pop(block)
            node.blocks[node.blocks.index(block)] = None
            node.num_blocks -= 1
            if not (node.num_blocks or node.num_children):
                self._prune(node)

    def clear(self) -> None:
        self._roots.clear()
        self._nodes.clear()
        self._homes.clear()

    def stored(self) -> list["StoredNode"]:
        """All nodes, parents before their children."""
        places: dict[int, int] = {}  # by id
        nodes = []
        for node in self._nodes.values():  # a parent stays as long as its children
            parent = node.parent
            assert parent is not None
            is_root = parent.parent is None
            nodes.append(
                StoredNode(
                    parent=None if is_root else places[id(parent)],
                    salt=parent.tokens.decode() if is_root else "",
                    tokens=node.tokens,
                    digest=node.digest,
                    blocks=tuple(node.blocks),
                )
            )
            places[id(node)] = len(places)
        return nodes

    def store(self, stored: Iterable["StoredNode"]) -> None:
        """Into an empty cache, what another with the same secret had."""
        nodes: list[Node] = []
        for each in stored:
            parent = self._root(each.salt) if each.parent is None else nodes[each.parent]
            node = Node(parent, each.digest, each.tokens, self._num_groups)
            node.blocks = list(each.blocks)
            node.num_blocks = len(node.blocks) - node.blocks.count(None)
            parent.num_children += 1
            self._nodes[node.digest] = node
            self._homes.update((block, node) for block in node.blocks if block is not None)
            nodes.append(node)

    def check_invariants(self) -> None:
        """Asserts that every hash points home."""
        children: dict[int, int] = {}
        for digest, node in self._nodes.items():
            assert node.digest == digest
            assert node.parent is not None
            children[id(node.parent)] = children.get(id(node.parent), 0) + 1
            for block in node.blocks:
                assert block is None or self._homes[block] is node, "a hash points astray"
            assert node.num_blocks == len(node.blocks) - node.blocks.count(None)
        for block, node in self._homes.items():
            assert block in node.blocks, f"block {block} isn't at home"
            assert self.is_alive(node), f"block {block} can't be found"
        for node in [*self._nodes.values(), *self._roots.values()]:
            assert node.num_children == children.get(id(node), 0), "children are miscounted"
            assert node.num_children or node.num_blocks, "a node holds nothing and leads nowhere"

    def _find_chain(
        self, hashes: Sequence[bytes], token_ids: "array[int]", count: int, salt: str
    ) -> list[Node]:
        found: list[Node] = []
        parent = self._roots.get(salt.encode())
        if parent is None or not count:
            return found
        step = self._block_size * token_ids.itemsize
        data = b""
        for index in range(count):
            node = self._nodes.get(hashes[index])
            if node is None or node.parent is not parent:
                break
            data = data or token_ids[: count * self._block_size].tobytes()
            if node.tokens != data[index * step : (index + 1) * step]:
                break
            for group in self._full_groups:
                if node.blocks[group] is None:
                    return found
            found.append(node)
            parent = node
        return found

    def _reachable(self, nodes: Sequence[Node]) -> int:
        """The most of these that a sequence can begin with: what its next token sees is there."""
        length = len(nodes)
        while length:
            place = self._last_missing(nodes, length)
            if place is None:
                break
            length = place
        return length

    def _last_missing(self, nodes: Sequence[Node], length: int) -> int | None:
        """Place of a block that a prefix of so many blocks lacks, and any longer than it."""
        firsts = self._layout.first_blocks(length * self._block_size)
        for index, group in enumerate(self._layout.groups):
            if not group.is_local:
                continue
            for place in range(length - 1, firsts[index] - 1, -1):
                if nodes[place].blocks[index] is None:
                    # A prefix that ends behind a missing block lacks that one, unless it ends with
                    # a chunk too: its next token sees none of them.
                    while self._sees_last_block(group, place) and (
                        nodes[place - 1].blocks[index] is None
                    ):
                        place -= 1
                    return place
        return None

    def _sees_last_block(self, group: CacheGroup, length: int) -> bool:
        """Whether the token after so many blocks sees any of them."""
        num_tokens = length * self._block_size
        return group.first_seen(num_tokens) < num_tokens

    def _root(self, salt: str) -> Node:
        name = salt.encode()
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Node(None, self._root_digest(salt), name, self._num_groups)
        return root

    def _root_digest(self, salt: str) -> bytes:
        # Tagged, and no other extra key may begin so: keys to come, such as adapters, get their
        # own tag and length.
        extra = salt.encode()
        return self._hash(self._secret + b"salt:%d:" % len(extra) + extra)

    def _prune(self, node: Node) -> None:
        while not (node.num_children or node.num_blocks):
            parent = node.parent
            if parent is None:
                if self._roots.get(node.tokens) is node:
                    del self._roots[node.tokens]
                return
            if not self.is_alive(node):
                return
            del self._nodes[node.digest]
            parent.num_children -= 1
            node = parent
