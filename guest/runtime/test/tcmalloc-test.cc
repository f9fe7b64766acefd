// SPDX-License-Identifier: Apache-2.0
/*
 * A fork while a thread takes over a topology that has changed. The child has that thread's memory and not the thread: it takes
 * the topology over by itself. Then: large objects are bound to no node while they are allocated, and what of them is elsewhere is
 * given up. Last, nodes without CPUs.
 *
 * The page of the driver is one of this program's, which cannot be read at first, so that the thread stops in the middle.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tcmalloc/internal/numa.h"
#include "tcmalloc/static_vars.h"

using tcmalloc::tcmalloc_internal::NumaTopology;
using tcmalloc::tcmalloc_internal::VnumaPage;

namespace {

// abi/guest-device
constexpr size_t kSize = 0x3000, kSequence = 24, kNumberOfCpus = 68, kNodes = 120;
constexpr uint32_t kCpus = 256;

NumaTopology<2> topology;
char* page;
uint64_t generation;
int stopped[2], go_on[2];

void Check(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "tcmalloc-test: %s\n", what);
  _exit(1);
}

template <typename T>
void Put(size_t at, T value) {
  memcpy(page + at, &value, sizeof(value));
}

void StopInTheMiddle(int) {
  char byte = 0;
  if (mprotect(page, kSize, PROT_READ) != 0 || write(stopped[1], &byte, 1) != 1 || read(go_on[0], &byte, 1) != 1)
    _exit(2);
}

// At boot all CPUs are on node 0, but for one that nobody runs on.
int OpenCpulist(size_t node) {
  if (node > 1) {
    errno = ENOENT;
    return -1;
  }
  const char* text = node == 0 ? "0-254\n" : "255\n";
  const int fd = memfd_create("cpulist", MFD_CLOEXEC);
  Check(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && lseek(fd, 0, SEEK_SET) == 0, "cpulist");
  return fd;
}

// By address, as the memory may have been freed.
int PolicyAt(uintptr_t memory) {
  int mode = -1;
  Check(syscall(SYS_get_mempolicy, &mode, nullptr, 0, memory, MPOL_F_ADDR) == 0, "get_mempolicy");
  return mode & ~MPOL_MODE_FLAGS;
}

constexpr size_t kHuge = size_t{2} << 20;
// Where a page of a huge page is looked at, among others.
constexpr size_t kLooked = kHuge / 8 * 5;

// The whole huge pages of an object have one policy, and what is before and after them stays bound.
void CheckPolicy(uintptr_t object, size_t size, int policy, const char* what) {
  const uintptr_t first = (object + kHuge - 1) / kHuge * kHuge, end = (object + size) / kHuge * kHuge;
  for (uintptr_t page = object; page < object + size; page += kHuge / 16)
    Check(PolicyAt(page) == (page >= first && page < end ? policy : MPOL_BIND), what);
}

// Of partition 0, which has a node on any machine.
void LargeObjectsAreBoundToNoNode() {
  auto& own = tcmalloc::tcmalloc_internal::tc_globals.numa_topology();
  own.vnuma_page_ = topology.vnuma_page_;
  for (const size_t size : {kHuge, 3 * kHuge, 3 * kHuge + kHuge / 2}) {
    void* object = malloc(size);
    const auto address = reinterpret_cast<uintptr_t>(object);
    Check(address % kHuge == 0, "an object that is large does not start with a huge page");
    CheckPolicy(address, size, MPOL_DEFAULT, "a large object is bound to a node, or what is next to it is bound to none");
    static_cast<volatile char*>(object)[kLooked] = 1;
    free(object);
    CheckPolicy(address, size, MPOL_BIND, "the memory of a large object stays unbound after it is freed");
    void* next = malloc(size);
    Check(reinterpret_cast<uintptr_t>(next) == address, "the next large object is elsewhere");
    CheckPolicy(address, size, MPOL_DEFAULT, "the next large object there is bound to a node");
    Check(static_cast<char*>(next)[kLooked] == 1, "memory was given up that is on a node of its own");
    free(next);
  }
  void* small = malloc(kHuge - 64 * 1024);
  Check(PolicyAt(reinterpret_cast<uintptr_t>(small)) == MPOL_BIND, "an object that is not large is bound to no node");
  free(small);
  own.bind_mode_ = tcmalloc::tcmalloc_internal::NumaBindMode::kStrict;
  void* strict = malloc(kHuge);
  CheckPolicy(reinterpret_cast<uintptr_t>(strict), kHuge, MPOL_BIND, "an object is bound to no node although that is strict");
  free(strict);
  own.bind_mode_ = tcmalloc::tcmalloc_internal::NumaBindMode::kAdvisory;
}

char* Map(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Check(memory != MAP_FAILED, "mmap");
  return static_cast<char*>(memory);
}

// As if AutoNUMA had taken a page elsewhere: it is on a node that the partition does not have.
void WhatIsElsewhereIsGivenUp() {
  auto& own = tcmalloc::tcmalloc_internal::tc_globals.numa_topology();
  char* memory = Map(4 * kHuge);
  char* first = memory + kHuge - reinterpret_cast<uintptr_t>(memory) % kHuge;
  // Only one page of the second huge page is there. The page before the first and that after the last are not whole ones.
  constexpr size_t kPage = 4096;
  char* object = first - kPage;
  const size_t size = 2 * kHuge + 2 * kPage;
  Check(madvise(memory, 4 * kHuge, MADV_NOHUGEPAGE) == 0, "madvise");
  memset(first, 1, kHuge);
  object[0] = first[kHuge + kLooked] = first[2 * kHuge] = 1;
  const uint64_t nowhere = uint64_t{1} << 63;
  errno = E2BIG;
  tcmalloc::tcmalloc_internal::GiveUpHugePages(object, size, nowhere);
  Check(errno == E2BIG, "errno has changed");
  Check(first[0] == 0 && first[kHuge - 1] == 0 && first[kHuge + kLooked] == 0, "what is elsewhere stays");
  Check(object[0] == 1 && first[2 * kHuge] == 1, "what is not a whole huge page was given up");
  // Where binding fails, the next pages would be elsewhere as well.
  own.vnuma_page_ = topology.vnuma_page_;
  const uint64_t nodes = own.partition_to_nodes_[1];
  own.partition_to_nodes_[1] = nowhere;
  first[0] = 1;
  own.Rebind(object, size, 1);
  Check(first[0] == 1, "memory was given up that cannot be bound");
  Check(errno == E2BIG, "errno has changed");
  own.partition_to_nodes_[1] = nodes;
  own.vnuma_page_ = nullptr;
  own.Rebind(object, size, 0);
  Check(PolicyAt(reinterpret_cast<uintptr_t>(first)) == MPOL_DEFAULT, "memory is bound without a driver");
}

// All CPUs are on node 0 when the program starts.
void CpusMayComeLater() {
  const auto cpulist = [](size_t node) {
    if (node <= 1) return open("/dev/null", O_RDONLY | O_CLOEXEC);
    errno = ENOENT;
    return -1;
  };
  for (const bool migrate : {false, true}) {
    static size_t cpus[tcmalloc::tcmalloc_internal::kMaxCpus + tcmalloc::tcmalloc_internal::kNumaCpuFudge];
    uint64_t nodes[2] = {0};
    auto mode = tcmalloc::tcmalloc_internal::NumaBindMode::kAdvisory;
    Check(tcmalloc::tcmalloc_internal::InitNumaTopology(cpus, nodes, &mode, 2, 1, cpulist, migrate) == migrate &&
              nodes[1] == 2,
          "a node without CPUs counts although they stay, or does not although they migrate");
  }
}

}  // namespace

int main() {
  char byte = 0;

  alarm(60);
  // Partition 0 has this node. The policy of the process is none of its mappings'.
  const unsigned long node_0 = 1;
  Check(syscall(SYS_set_mempolicy, MPOL_BIND, &node_0, 8 * sizeof(node_0)) == 0, "set_mempolicy");
  setenv("TCMALLOC_NUMA_AWARE", "1", 1);
  topology.InitForTest(OpenCpulist);
  Check(topology.numa_aware(), "it does not know that there are nodes");
  page = static_cast<char*>(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  Check(page != MAP_FAILED && pipe(stopped) == 0 && pipe(go_on) == 0, "preparing");
  Put<uint32_t>(kSequence, 2);
  Put<uint32_t>(kNumberOfCpus, kCpus);
  for (size_t cpu = 0; cpu < kCpus; cpu++) Put<uint16_t>(kNodes + 2 * cpu, 1);
  topology.vnuma_page_ = reinterpret_cast<const VnumaPage*>(page);
  topology.vnuma_generation_ = &generation;
  Check(topology.GetCurrentPartition() == 0, "it looks at the page although nothing has changed");

  signal(SIGSEGV, StopInTheMiddle);
  Check(mprotect(page, kSize, PROT_NONE) == 0, "mprotect");
  __atomic_store_n(&generation, 7, __ATOMIC_RELEASE);
  std::thread follower([] {
    Check(tcmalloc::tcmalloc_internal::subtle::percpu::IsFast(), "a thread does not know its CPU");
    Check(topology.GetCurrentPartition() == 1, "the thread did not follow");
  });
  Check(read(stopped[0], &byte, 1) == 1, "the thread did not stop");
  const pid_t child = fork();
  Check(child >= 0, "fork");
  if (child == 0) {
    Check(topology.GetCurrentPartition() == 1, "the child of a fork in the middle does not follow");
    _exit(0);
  }
  int status = 0;
  Check(waitpid(child, &status, 0) == child && status == 0, "the child failed");
  // Nor does it wait in the parent.
  Check(topology.GetCurrentPartition() == 1, "another thread did not follow");
  Check(write(go_on[1], &byte, 1) == 1, "letting the thread go on");
  follower.join();

  // What the driver is writing is read again later.
  Check(mprotect(page, kSize, PROT_READ | PROT_WRITE) == 0, "mprotect");
  Put<uint32_t>(kSequence, 3);
  for (size_t cpu = 0; cpu < kCpus; cpu++) Put<uint16_t>(kNodes + 2 * cpu, 0);
  __atomic_store_n(&generation, 8, __ATOMIC_RELEASE);
  Check(topology.GetCurrentPartition() == 1, "it took over what was being written");
  Put<uint32_t>(kSequence, 4);
  Check(topology.GetCurrentPartition() == 0, "it did not look again");
  LargeObjectsAreBoundToNoNode();
  WhatIsElsewhereIsGivenUp();
  CpusMayComeLater();
  puts("tcmalloc: ok");
  return 0;
}
