// The Python handle of an asynchronous operation.
#pragma once

#include <memory>

#include "core/context.h"

namespace mpidp {

struct Work {
  std::shared_ptr<Operation> operation;
  std::shared_ptr<Context> context;
};

// Drops what finished operations kept alive. Needs the GIL.
void release_finished(Context& context);

}  // namespace mpidp
