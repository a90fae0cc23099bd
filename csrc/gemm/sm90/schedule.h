// How the warpgroups of a Hopper kernel divide the tiles.
#pragma once

namespace epigemm::sm90 {

enum class Schedule {
  Cooperative,  // two warpgroups share each output tile: for the largest tiles; the epilogue is not hidden
  Pingpong,     // two warpgroups have alternate tiles, and one's epilogue runs during the other's mainloop
  Single,       // one warpgroup: the smallest tiles, for grids of few tiles
};

constexpr const char* schedule_name(Schedule schedule) {
  constexpr const char* kNames[] = {"cooperative", "pingpong", "single"};
  return kNames[static_cast<int>(schedule)];
}

}  // namespace epigemm::sm90
