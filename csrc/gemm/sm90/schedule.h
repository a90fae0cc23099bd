// How the warpgroups of a Hopper kernel share their tiles.
#pragma once

namespace epigemm::sm90 {

enum class Schedule {
  Cooperative,  // two warpgroups share one output tile: the largest tiles, whose epilogue nothing hides
  Pingpong,     // two warpgroups take turns, one's epilogue under the other's mainloop: smaller tiles
  Single,       // one warpgroup: the smallest tiles, for grids of few
};

constexpr const char* schedule_name(Schedule schedule) {
  constexpr const char* kNames[] = {"cooperative", "pingpong", "single"};
  return kNames[static_cast<int>(schedule)];
}

}  // namespace epigemm::sm90
