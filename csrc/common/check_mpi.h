// The one gate for MPI return codes.
#pragma once

#include <mpi.h>

#include <string>

#include "common/check.h"

namespace mpidp {

[[noreturn]] inline void throw_mpi_error(int code, const char* call) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ErrorKind::kMpi,
              std::string(call) + ": " + std::string(text, static_cast<std::size_t>(length)));
}

}  // namespace mpidp

#define MPIDP_MPI_CHECK(call)                                                           \
  do {                                                                                  \
    const int mpidp_mpi_code = (call);                                                  \
    if (mpidp_mpi_code != MPI_SUCCESS) ::mpidp::throw_mpi_error(mpidp_mpi_code, #call); \
  } while (0)
