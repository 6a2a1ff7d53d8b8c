// Clusters that run at once.
#pragma once

#include <cstdint>

namespace upfold::cuda {

// Of blocks that have a multiprocessor each, on an H100's 132, by the runtime.
struct ClustersAtOnce {
  std::int64_t blocks, count;
};
constexpr ClustersAtOnce kClustersAtOnce[] = {{2, 66}, {3, 39}, {4, 30}, {5, 22}, {8, 15}};

}  // namespace upfold::cuda
