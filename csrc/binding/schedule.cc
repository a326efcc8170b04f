#include "schedule/schedule.h"

#include <nanobind/stl/string.h>

#include <string>

#include "binding/module.h"
#include "common/check.h"

namespace nb = nanobind;

namespace mpidp {
namespace {

const char* name_of_kind(StepKind kind) {
  switch (kind) {
    case StepKind::kSend:
      return "send";
    case StepKind::kReceive:
      return "receive";
    case StepKind::kReceiveReduce:
      return "receive_reduce";
    case StepKind::kReduceOrdered:
      return "reduce_ordered";
    case StepKind::kCopy:
      return "copy";
  }
  return "";
}

const char* name_of_buffer(BufferId buffer) {
  switch (buffer) {
    case BufferId::kInput:
      return "input";
    case BufferId::kOutput:
      return "output";
    case BufferId::kScratch:
      return "scratch";
  }
  return "";
}

ScheduleRequest request_of(const char* collective, const char* algorithm) {
  const int parsed_collective = parse_collective(collective);
  const int parsed_algorithm = parse_algorithm(algorithm);
  if (parsed_collective < 0 || parsed_algorithm < 0) {
    throw Error(ErrorKind::kInvalidValue, std::string("no schedule for collective \"") +
                                              collective + "\" by algorithm \"" + algorithm + "\"");
  }
  ScheduleRequest request;
  request.collective = static_cast<Collective>(parsed_collective);
  request.algorithm = static_cast<Algorithm>(parsed_algorithm);
  return request;
}

}  // namespace

void register_schedules(nb::module_& module) {
  module.def(
      "schedule",
      [](const char* collective, const char* algorithm, int world_size, int rank,
         std::int64_t count, int root, std::int64_t segment_count) {
        ScheduleRequest request = request_of(collective, algorithm);
        request.world_size = world_size;
        request.rank = rank;
        request.count = count;
        request.root = root;
        request.segment_count = segment_count;
        const Schedule schedule = make_schedule(request);
        nb::list steps;
        for (const Step& step : schedule.steps) {
          steps.append(nb::make_tuple(name_of_kind(step.kind), name_of_buffer(step.source_buffer),
                                      name_of_buffer(step.destination_buffer), int{step.final},
                                      int{step.received_first}, step.peer, step.source_offset,
                                      step.destination_offset, step.count, step.stride));
        }
        return nb::make_tuple(steps, schedule.scratch_count);
      },
      nb::arg("collective"), nb::arg("algorithm"), nb::arg("world_size"), nb::arg("rank"),
      nb::arg("count"), nb::arg("root") = 0, nb::arg("segment_count") = 0);
  module.def(
      "has_schedule",
      [](const char* collective, const char* algorithm) {
        const ScheduleRequest request = request_of(collective, algorithm);
        return has_schedule(request.collective, request.algorithm);
      },
      nb::arg("collective"), nb::arg("algorithm"));
}

}  // namespace mpidp
