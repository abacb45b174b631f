// Shared by selection.cpp and positions.cpp: the segments of a selection.
#pragma once
#include "teams.hpp"

namespace gc {

struct Run {  // gcbench.ops.selection.KeptRun
  int64_t start, rows, length, keep;
};

}  // namespace gc
