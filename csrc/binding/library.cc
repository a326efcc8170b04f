// Which MPI this is, and what happens in a forked child.

#include <mpi.h>
#include <nanobind/stl/string.h>
#include <pthread.h>

#include <string>

#include "binding/module.h"
#include "transport/shared_memory.h"

namespace nb = nanobind;

namespace mpidp {
namespace {

std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  return std::string(text, static_cast<std::size_t>(length));
}

std::string built_against() {
#if defined(I_MPI_VERSION)
  return std::string("Intel MPI ") + I_MPI_VERSION;
#elif defined(MPICH_VERSION)
  return std::string("MPICH ") + MPICH_VERSION;
#elif defined(OMPI_MAJOR_VERSION)
  return "Open MPI " + std::to_string(OMPI_MAJOR_VERSION) + "." +
         std::to_string(OMPI_MINOR_VERSION) + "." + std::to_string(OMPI_RELEASE_VERSION);
#else
  return "MPI " + std::to_string(MPI_VERSION) + "." + std::to_string(MPI_SUBVERSION);
#endif
}

}  // namespace

void register_library(nb::module_& module) {
  module.def("mpi_library", &mpi_library);
  module.def("built_against", &built_against);
  pthread_atfork(nullptr, nullptr, [] { MemoryRegistry::instance().disown_after_fork(); });
}

}  // namespace mpidp
