// SPDX-License-Identifier: Apache-2.0
/*
 * A fork while a thread takes over a topology that has changed. The child has that thread's memory and not the thread: it takes
 * the topology over by itself.
 *
 * The page of the driver is one of this program's, which cannot be read at first, so that the thread stops in the middle.
 */
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tcmalloc/internal/numa.h"

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

}  // namespace

int main() {
  char byte = 0;

  alarm(60);
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
  puts("tcmalloc: ok");
  return 0;
}
