// Binomial tree: broadcast and reduce for short arrays. Registered as
// "recursive_doubling": the number of ranks that hold the data (broadcast)
// doubles in every round.
//
// Ranks are counted from the root: v = rank - root (mod P). The parent of v is
// v with its lowest set bit cleared; the children of v are v + 2^i for all 2^i
// below that bit (for the root: all powers below P), as far as they exist.
// Broadcast goes down the tree, largest child first, as its subtree is the
// deepest. Reduce goes up, smallest child first, as it is ready first.
//
// An array longer than a segment is cut, and each segment walks the tree by
// itself.
//
// Cost, L = ceil(log2 P): broadcast L (alpha + n beta), reduce L (alpha + n
// beta + n gamma).
//
// Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
// communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19
// (2005), on broadcast and on reduce.
#include "schedule/builder.h"

namespace mpidp {
namespace {

struct Node {
  explicit Node(const ScheduleRequest& request)
      : world_size(request.world_size),
        root(request.root),
        index((request.rank - root + world_size) % world_size) {
    // 2^i of the link to the parent; for the root the first power of two that
    // reaches P.
    while (link < world_size && (index & link) == 0) link <<= 1;
  }
  bool is_root() const { return index == 0; }
  int parent() const { return rank_of(index - link); }
  bool has_child(int distance) const { return index + distance < world_size; }
  int child(int distance) const { return rank_of(index + distance); }
  int rank_of(int node) const { return (node + root) % world_size; }

  int world_size, root, index;
  int link = 1;
};

}  // namespace

void binomial_broadcast(const ScheduleRequest& request, Builder& builder) {
  const Node node(request);
  const Place source = node.is_root() ? input_at(0) : output_at(0);
  for (int i = 0; i < builder.num_segments(request.count); ++i) {
    const Range segment = builder.segment(request.count, i);
    if (!node.is_root()) {
      builder.add(receive_from(node.parent(), output_at(segment.offset), segment.count));
    }
    for (int distance = node.link / 2; distance > 0; distance /= 2) {
      if (!node.has_child(distance)) continue;
      builder.add(send_to(node.child(distance), source + segment.offset, segment.count));
    }
  }
  if (node.is_root()) builder.copy(input_at(0), output_at(0), request.count);
}

void binomial_reduce(const ScheduleRequest& request, Builder& builder) {
  const Node node(request);
  // Two slots, so that the partial sum of one segment can be sent while the
  // next is summed. A leaf sends its input as it is.
  constexpr int kSlots = 2;
  const bool is_leaf = node.link == 1 || !node.has_child(1);
  const int num_segments = builder.num_segments(request.count);
  const std::int64_t slot_count = builder.longest_segment(request.count);
  if (!node.is_root() && !is_leaf) {
    builder.need_scratch(slot_count * std::min(kSlots, num_segments));
  }
  int last_child = 0;
  for (int distance = 1; distance < node.link && node.has_child(distance); distance *= 2) {
    last_child = distance;
  }
  for (int i = 0; i < num_segments; ++i) {
    const Range segment = builder.segment(request.count, i);
    const Place partial =
        node.is_root() ? output_at(segment.offset) : scratch_at(slot_count * (i % kSlots));
    Place source = input_at(segment.offset);
    for (int distance = 1; distance <= last_child; distance *= 2) {
      const bool final = node.is_root() && distance == last_child;
      builder.add(
          reduce_from(node.child(distance), request.rank, source, partial, segment.count, final));
      source = partial;
    }
    if (!node.is_root()) builder.add(send_to(node.parent(), source, segment.count));
  }
}

}  // namespace mpidp
