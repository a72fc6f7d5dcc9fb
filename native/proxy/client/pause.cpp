// This process is written to files while its server stays (a snapshot). Made again from them, it is as one
// whose server has died behind an optimizer step; else it goes on as if nothing had been.
#include "proxy/client/connection.h"

namespace jitckpt::proxy::client {
namespace {

bool waits(const Slot& slot) { return slot.waits != Waits::no && slot.answered != slot.asked; }

}  // namespace

void Connection::pause() {
  hold_.pause();
  writer_.stop();
}

bool Connection::is_quiet() const {
  if (log_.control().read < writer_.newest()) return false;
  for (std::size_t index = 0; index < slot_count; ++index) {
    if (waits(log_.slot(index))) return false;
  }
  return true;
}

std::string Connection::settle() {
  std::lock_guard lock(mutex_);
  if (!server_->is_of_agent()) return "its device's server is a process of its own";
  const auto device = server_->settle(longest_settling);
  if (!device || device->suspect != 0 || !nothing_has_failed()) return "its device has not come to rest";
  if (images_.empty() || !is_usable(images_.back()) || !images_.back().leads_on())
    return "there is no image of its newest state";
  try {
    copy_state(images_.back().state, device);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  server_->watch_no_more();
  if (spare_) spare_->watch_no_more();
  return "";
}

void Connection::watch_again() {
  {
    std::lock_guard lock(mutex_);
    server_->watch_again();
    if (spare_) spare_->watch_again();
  }
  writer_.go_on();
}

// Should something have failed, the recovery that follows may need the copy.
bool Connection::go_on_from_pause() {
  if (!hold_.release()) return false;
  forget_copy();
  validation_.hear(Validation::Heard::again);
  return true;
}

}  // namespace jitckpt::proxy::client
