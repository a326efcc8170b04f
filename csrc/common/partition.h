// The one block decomposition: how `count` elements are split into chunks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mpidp {

// A half-open range of elements: [offset, offset + count).
struct Range {
  std::int64_t offset = 0;
  std::int64_t count = 0;
};

// Chunk `index` of `count` elements split over `num_chunks`. Sizes differ by at
// most one granule; every boundary but the last is a multiple of `granule`
// elements, so that neighbours do not share a cache line when the granule fills
// one. Chunks may be empty.
constexpr Range chunk_of(std::int64_t count, int num_chunks, int index, std::int64_t granule = 1) {
  const std::int64_t granules = (count + granule - 1) / granule;
  const std::int64_t base = granules / num_chunks;
  const std::int64_t extra = granules % num_chunks;
  const std::int64_t first = index * base + std::min<std::int64_t>(index, extra);
  const std::int64_t last = first + base + (index < extra ? 1 : 0);
  const std::int64_t begin = std::min(first * granule, count);
  const std::int64_t end = std::min(last * granule, count);
  return Range{begin, end - begin};
}

}  // namespace mpidp
