// A recovery of the whole job, as the agent orders it: every rank's server is replaced, and all go on from
// one state.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <stdexcept>
#include <string>

#include "proxy/client/connection.h"

namespace jitckpt::proxy::client {
namespace {

control::Membership member_of(const CommunicatorEntry& one) {
  return {one.key, one.parent, one.split, one.rank, static_cast<uint32_t>(one.size), control::lasting, 0, {}};
}

void add_counts(control::Membership& member, uint64_t state, const Counts& counts) {
  for (const auto& [peer, counted] : counts)
    member.counts.push_back({state, peer, counted.sent, counted.received});
}

}  // namespace

// No image or check becomes whole, no optimizer step begins, and no answer comes.
void Connection::freeze() {
  std::lock_guard lock(mutex_);
  log_.control().images = Images::frozen;
  copy_flags_.freeze();
}

control::Stopped Connection::report() {
  const Hold::Failed failed = hold_.failed();
  std::lock_guard lock(mutex_);
  control::Stopped report{1,
                          0,
                          0,
                          0,
                          control::DeviceState::lost,
                          0,
                          0,
                          0,
                          writer_.newest(),
                          failed.call,
                          failed.error,
                          {},
                          outgrown_since_};
  const bool stays = std::ranges::any_of(images_, [](const Image& image) { return !image.whole; });
  if (stays) rest();
  std::vector<const Image*> images;
  for (const Image& image : images_) {
    // A step that has begun, and can't be finished: what was before is gone.
    if (!image.leads_on() && log_.control().step_begun >= image.state) images.clear();
    if (is_usable(image) && image.leads_on()) images.push_back(&image);
  }
  if (images.empty()) return report;
  report.kept_from = images.front()->state;
  report.kept_to = report.begun = report.ended = report.ready = images.back()->state;
  for (const Image* const image : images) {
    const uint64_t bit = uint64_t{1} << (image->state - report.kept_from);
    if (image->whole)
      report.images |= bit;
    else if ((copied_ && copied_->state == image->state) || saved_state(*image))
      report.copies |= bit;
  }
  if (stays) report_device(report);
  for (const CommunicatorEntry& one : communicators_.all()) {
    control::Membership member = member_of(one);
    for (const Image* const image : images) {
      if (!one.lived(image->start.sequence)) continue;
      member.since = std::min(member.since, image->state);
      member.until = one.ended == 0 ? control::lasting : image->state;
      if (const auto counts = image->counts.find(one.handle); counts != image->counts.end())
        add_counts(member, image->state, counts->second);
    }
    if (member.since != control::lasting) report.communicators.push_back(member);
  }
  return report;
}

control::Standing Connection::standing(std::chrono::steady_clock::duration waited) const {
  using std::chrono::duration_cast, std::chrono::microseconds;
  const auto limit = hang_time();
  control::Standing standing{static_cast<uint64_t>(duration_cast<microseconds>(waited).count()),
                             limit ? static_cast<uint64_t>(microseconds(*limit).count()) : 0,
                             {}};
  const auto add = [&standing](const CommunicatorEntry& one) {
    control::Membership& member = standing.communicators.emplace_back(member_of(one));
    member.since = 0;
    member.until = control::lasting;
    add_counts(member, control::lasting, one.counts);
  };
  for (const CommunicatorEntry& one : communicators_.all()) {
    if (one.ended == 0) add(one);
  }
  for (const CommunicatorEntry& one : communicators_.awaited()) add(one);
  return standing;
}

std::vector<control::NamedId> Connection::make_ids() {
  const std::vector<Key> keys = communicators_.to_renew();
  const std::vector<ncclUniqueId> ids = server_->make_ids(keys.size());
  std::vector<control::NamedId> named;
  for (std::size_t i = 0; i < keys.size(); ++i) named.push_back({keys[i], ids[i]});
  return named;
}

void Connection::replay(uint64_t recovery, const control::Replay& order) {
  hold_.replay(order.deliver_error != 0, [&] {
    std::lock_guard lock(mutex_);
    const auto image = std::find_if(images_.begin(), images_.end(), [&](const Image& one) {
      return one.state == order.state && is_usable(one);
    });
    if (image == images_.end() || !image->leads_on())
      throw std::runtime_error("this process keeps no copy of state " + std::to_string(order.state));
    std::vector<LogWriter::Apart> ids;
    for (const control::NamedId& one : order.ids) {
      const wire::renew_id renewed{one.key, one.id};
      const Bytes bytes = bytes_of(renewed);
      ids.push_back({static_cast<uint16_t>(Call::renew_id), 0, {bytes.begin(), bytes.end()}});
    }
    const auto made = communicators_.creations(image->start.sequence, order.creations, order.ids);
    std::vector<LogWriter::Apart> overwriting;
    if (check_ && image->whole) {  // else there is more to keep than the image has
      check_->overwrites = order.overwrite != 0 && check_->state == order.state;
      const uint8_t filled_with = check_->overwrites ? wire::overwritten : 0;
      log_.control().filled_with = filled_with;
      overwriting = image->filling(filled_with);
      if (check_->overwrites) std::ranges::copy(check_->overwriting(), std::back_inserter(overwriting));
    }
    Source source{order.in_place != 0, {}};
    if (!image->whole && !source.in_place) {
      if (order.source.size() != 1 || order.source.front().digest != image->digest)
        throw std::runtime_error("the state that is to be taken is not this rank's");
      source.copy = order.source.front();
    }
    log_.control().recovery = recovery;
    recovers_from_failure_ = order.overwrite == 0;
    if (!begin_server(*image, ids, made, overwriting, source))
      throw std::runtime_error("the log has no room for a replay: raise JITCKPT_PROXY_LOG_BYTES");
    if (recovers_from_failure_) ++recoveries_;
  });
}

bool Connection::replayed() const { return log_.control().read >= replay_end_; }

// A kernel may fail of what was overwritten, and nothing tells of that: the program makes no call meanwhile.
std::string Connection::failed_trial() {
  std::lock_guard lock(mutex_);
  if (recovers_from_failure_ || !check_ || log_.control().check_compared == check_->number) return "";
  const std::optional<MachineFailure> failure = pending_failure();
  return "a validation could not be made as it should, with what may not be needed overwritten (" +
         (failure ? failure->describe() : "the memory was not compared") +
         "), which says nothing of the program";
}

bool Connection::release() {
  const uint64_t next = states_ + 1;  // none is added while the host is held
  if (!hold_.release()) return false;
  intact_from_ = next;
  forget_copy();
  const bool rested = validation_.rests();
  validation_.hear(Validation::Heard::again);
  if (recovers_from_failure_ && !rested)
    std::fprintf(stderr, "jitckpt: the device proxy's server is process %d now; the program goes on.\n",
                 server_->id());
  return true;
}

void Connection::give_up(const std::string& why) {
  watch_again();
  end_spare();
  {
    std::lock_guard lock(mutex_);
    writer_.keep_nothing();
    log_.control().images = Images::unwanted;
    if (!begun_ || rested_) server_->kill();  // it answers no call
  }
  hold_.give_up(why);
  validation_.hear(Validation::Heard::over);
}

}  // namespace jitckpt::proxy::client
