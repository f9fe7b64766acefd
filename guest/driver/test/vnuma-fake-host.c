// SPDX-License-Identifier: GPL-2.0
/*
 * vnuma-fake-host: plays the host's end of the topology channel, for tests of the
 * guest driver without vnumad, malformed publications included.
 *
 *	vnuma-fake-host [--qmp SOCKET --bus ID] --listen SOCKET
 *
 * It serves the ivshmem protocol on the socket of --listen. With --qmp it also
 * has that QEMU hot-plug the device into the PCIe root port ID. Then it executes lines
 * of standard input and answers each with one line on standard output:
 *
 *	publish APIC:NODE,...	publish, ring, await the acknowledgement
 *				-> acknowledged GENERATION fast|safe MICROSECONDS | silent GENERATION
 *	write APIC:NODE,...	publish without ringing -> written GENERATION
 *	nodes N			nr_nodes of later publications -> ok
 *	order NODE DOMAIN ...	the proximity domain of each node of the guest: later commands
 *				have the guest's nodes, later publications the domains -> ok
 *	distance FROM TO D	of later publications -> ok
 *	devices SEGMENT:BUS:DEVICE.FUNCTION=NODE,...
 *				of later publications, or none; hexadecimal but NODE -> ok
 *	no-devices		later publications are a host's that does not know devices -> ok
 *	changes			how many devices came or went, as the guest counts -> changes COUNT
 *	ring			-> ok
 *	ring-await		ring, await any acknowledgement
 *				-> acknowledged ... | silent ...
 *	await			one that has come since the last ring, or comes
 *				-> acknowledged ... | silent ...
 *	refused			what the guest refused last -> refused GENERATION ERRNO
 *	poke OFFSET BYTES VALUE	change the memory (header or slot) -> ok
 *	slot			offsets of the current slot, of its section of vCPUs and of
 *				its section of devices -> OFFSET OFFSET OFFSET
 *	qmp COMMAND		to that QEMU; it must succeed -> ok
 *	quit
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <vnuma/topology_channel.h>

#define ACK_TIMEOUT_MS	50000

static uint8_t *memory;
static int memory_fd;
static int host_fds[VNUMA_IVSHMEM_VECTORS];
static int guest_fds[VNUMA_IVSHMEM_VECTORS];
static int peer = -1;
static const char *qmp_path;

static uint32_t epoch;
static uint32_t counter;
static uint32_t nr_nodes = 4;
/* By node of the guest; others are published as they are. */
static uint32_t domains[VNUMA_TC_MAX_NODES];
static uint8_t distance[VNUMA_TC_MAX_NODES][VNUMA_TC_MAX_NODES];
static struct vnuma_tc_device devices[VNUMA_TC_MAX_DEVICES];
static uint32_t nr_devices;
static bool knows_devices = true;

static void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fprintf(stderr, "vnuma-fake-host: ");
	vfprintf(stderr, format, args);
	fprintf(stderr, ": %s\n", strerror(errno));
	va_end(args);
	exit(1);
}

static uint64_t now_us(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000ULL + ts.tv_nsec / 1000;
}

static void init_memory(void)
{
	struct vnuma_tc_header *header;
	int from, to;

	memory_fd = memfd_create("vnuma-fake-host", MFD_CLOEXEC);
	if (memory_fd < 0 || ftruncate(memory_fd, VNUMA_TC_REGION_SIZE))
		die("memfd");
	memory = mmap(NULL, VNUMA_TC_REGION_SIZE, PROT_READ | PROT_WRITE,
		      MAP_SHARED, memory_fd, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	for (from = 0; from < VNUMA_TC_MAX_NODES; from++)
		domains[from] = from;
	header = (void *)memory;
	header->layout = VNUMA_TC_LAYOUT;
	header->header_size = sizeof(struct vnuma_tc_header);
	header->region_size = VNUMA_TC_REGION_SIZE;
	header->slot_size = VNUMA_TC_SLOT_SIZE;
	header->slot_offset[0] = VNUMA_TC_SLOT0_OFFSET;
	header->slot_offset[1] = VNUMA_TC_SLOT1_OFFSET;
	header->guest_offset = VNUMA_TC_GUEST_OFFSET;
	header->guest_size = VNUMA_TC_GUEST_SIZE;
	header->nr_supported = 3;
	header->supported[0].kind = VNUMA_TC_SECTION_NODES;
	header->supported[0].version = VNUMA_TC_NODES_VERSION;
	header->supported[1].kind = VNUMA_TC_SECTION_VCPUS;
	header->supported[1].version = VNUMA_TC_VCPUS_VERSION;
	header->supported[2].kind = VNUMA_TC_SECTION_DEVICES;
	header->supported[2].version = VNUMA_TC_DEVICES_VERSION;
	header->magic = VNUMA_TC_MAGIC;
	for (from = 0; from < VNUMA_TC_MAX_NODES; from++)
		for (to = 0; to < VNUMA_TC_MAX_NODES; to++)
			distance[from][to] = from == to ? 10 : 20;
}

static void send_message(int64_t value, int fd)
{
	char control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec iov = { &value, sizeof(value) };
	struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (fd >= 0) {
		struct cmsghdr *header;

		message.msg_control = control;
		message.msg_controllen = sizeof(control);
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(header), &fd, sizeof(int));
	}
	if (sendmsg(peer, &message, MSG_NOSIGNAL) != sizeof(value))
		die("ivshmem message");
}

static void greet_peer(void)
{
	int i;

	send_message(0, -1);
	send_message(VNUMA_IVSHMEM_GUEST_PEER, -1);
	send_message(-1, memory_fd);
	for (i = 0; i < VNUMA_IVSHMEM_VECTORS; i++)
		send_message(VNUMA_IVSHMEM_HOST_PEER, host_fds[i]);
	for (i = 0; i < VNUMA_IVSHMEM_VECTORS; i++)
		send_message(VNUMA_IVSHMEM_GUEST_PEER, guest_fds[i]);
}

static int unix_socket(const char *path, struct sockaddr_un *address)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	memset(address, 0, sizeof(*address));
	address->sun_family = AF_UNIX;
	if (fd < 0 || strlen(path) >= sizeof(address->sun_path))
		die("socket %s", path);
	strcpy(address->sun_path, path);
	return fd;
}

static int listen_on(const char *path)
{
	struct sockaddr_un address;
	int fd = unix_socket(path, &address);

	unlink(path);
	if (bind(fd, (void *)&address, sizeof(address)) || listen(fd, 1))
		die("%s", path);
	return fd;
}

/* Reads up to the line that has "return"; events in between are passed over. */
static void qmp_await(FILE *qmp, const char *command)
{
	char line[65536];

	while (fgets(line, sizeof(line), qmp)) {
		if (strstr(line, "\"return\""))
			return;
		if (strstr(line, "\"error\"")) {
			fprintf(stderr, "vnuma-fake-host: %s: %s", command, line);
			exit(1);
		}
	}
	die("QMP %s", command);
}

static void qmp_send(FILE *qmp, const char *format, ...)
{
	char command[4096];
	va_list args;

	va_start(args, format);
	vsnprintf(command, sizeof(command), format, args);
	va_end(args);
	if (send(fileno(qmp), command, strlen(command), MSG_NOSIGNAL) < 0)
		die("QMP");
	qmp_await(qmp, command);
}

static FILE *qmp_connect(void)
{
	struct sockaddr_un address;
	int fd = unix_socket(qmp_path, &address);
	char greeting[4096];
	FILE *qmp;

	if (connect(fd, (void *)&address, sizeof(address)))
		die("%s", qmp_path);
	qmp = fdopen(fd, "r");
	if (!qmp || !fgets(greeting, sizeof(greeting), qmp))
		die("QMP greeting");
	qmp_send(qmp, "{\"execute\":\"qmp_capabilities\"}\n");
	return qmp;
}

static void qmp_command(const char *command)
{
	FILE *qmp;

	if (!qmp_path) {
		printf("no --qmp\n");
		return;
	}
	qmp = qmp_connect();
	qmp_send(qmp, "%s", command);
	fclose(qmp);
	printf("ok\n");
}

static void plug_device(const char *bus, const char *channel)
{
	FILE *qmp = qmp_connect();

	qmp_send(qmp,
		 "{\"execute\":\"chardev-add\",\"arguments\":{\"id\":\"fakechar\",\"backend\":{\"type\":\"socket\",\"data\":{\"addr\":{\"type\":\"unix\",\"data\":{\"path\":\"%s\"}},\"server\":false}}}}\n",
		 channel);
	qmp_send(qmp,
		 "{\"execute\":\"device_add\",\"arguments\":{\"driver\":\"ivshmem-doorbell\",\"id\":\"fakedev\",\"bus\":\"%s\",\"chardev\":\"fakechar\",\"vectors\":%d,\"master\":\"on\"}}\n",
		 bus, VNUMA_IVSHMEM_VECTORS);
	fclose(qmp);
}

static struct vnuma_tc_slot *slot_of(uint32_t of_counter)
{
	return (void *)(memory + (of_counter & 1 ? VNUMA_TC_SLOT1_OFFSET :
						   VNUMA_TC_SLOT0_OFFSET));
}

static uint64_t generation(void)
{
	return (uint64_t)epoch << 32 | counter;
}

static struct vnuma_tc_nodes *nodes_of(struct vnuma_tc_slot *slot)
{
	return (void *)(slot + 1);
}

static uint32_t nodes_length(void)
{
	return sizeof(struct vnuma_tc_nodes) + (nr_nodes * nr_nodes + 7) / 8 * 8;
}

static struct vnuma_tc_vcpus *vcpus_of(struct vnuma_tc_slot *slot)
{
	return (void *)((uint8_t *)nodes_of(slot) + nodes_length());
}

static uint32_t domain_of(uint32_t node)
{
	return node < VNUMA_TC_MAX_NODES ? domains[node] : node;
}

static void write_nodes(struct vnuma_tc_nodes *nodes)
{
	uint8_t *to = (uint8_t *)(nodes + 1);
	uint32_t from, into;

	*nodes = (struct vnuma_tc_nodes){
		.section = { .kind = VNUMA_TC_SECTION_NODES,
			     .version = VNUMA_TC_NODES_VERSION,
			     .compatible = 1, .length = nodes_length() },
		.nr_nodes = nr_nodes,
		.distance_offset = sizeof(*nodes),
	};
	for (from = 0; from < nr_nodes; from++)
		for (into = 0; into < nr_nodes; into++)
			if (domains[from] < nr_nodes && domains[into] < nr_nodes)
				to[domains[from] * nr_nodes + domains[into]] = distance[from][into];
}

static uint32_t write_vcpus(struct vnuma_tc_vcpus *vcpus, char *pairs)
{
	struct vnuma_tc_vcpu *vcpu = (void *)(vcpus + 1);
	char *pair, *state = NULL;
	uint32_t n = 0;

	for (pair = strtok_r(pairs, ",\n", &state); pair;
	     pair = strtok_r(NULL, ",\n", &state)) {
		if (n == VNUMA_TC_MAX_VCPUS ||
		    sscanf(pair, "%u:%u", &vcpu[n].apic_id, &vcpu[n].node) != 2)
			break;
		vcpu[n].node = domain_of(vcpu[n].node);
		n++;
	}
	*vcpus = (struct vnuma_tc_vcpus){
		.section = { .kind = VNUMA_TC_SECTION_VCPUS,
			     .version = VNUMA_TC_VCPUS_VERSION, .compatible = 1,
			     .length = sizeof(*vcpus) + n * sizeof(*vcpu) },
		.nr_vcpus = n,
		.vcpu_offset = sizeof(*vcpus),
		.vcpu_size = sizeof(*vcpu),
	};
	return vcpus->section.length;
}

static struct vnuma_tc_devices *devices_of(struct vnuma_tc_slot *slot)
{
	struct vnuma_tc_vcpus *vcpus = vcpus_of(slot);

	return (void *)((uint8_t *)vcpus + sizeof(*vcpus) +
			vcpus->nr_vcpus * sizeof(struct vnuma_tc_vcpu));
}

static uint32_t write_devices(struct vnuma_tc_devices *section)
{
	size_t size = nr_devices * sizeof(devices[0]);

	*section = (struct vnuma_tc_devices){
		.section = { .kind = VNUMA_TC_SECTION_DEVICES,
			     .version = VNUMA_TC_DEVICES_VERSION,
			     .compatible = 1, .length = sizeof(*section) + size },
		.nr_devices = nr_devices,
		.device_offset = sizeof(*section),
		.device_size = sizeof(devices[0]),
	};
	memcpy(section + 1, devices, size);
	return section->section.length;
}

static void write_slot(char *pairs)
{
	struct vnuma_tc_header *header = (void *)memory;
	struct vnuma_tc_slot *slot = slot_of(++counter);

	__atomic_store_n(&slot->generation, 0, __ATOMIC_SEQ_CST);
	write_nodes(nodes_of(slot));
	slot->length = sizeof(*slot) + nodes_length() +
		       write_vcpus(vcpus_of(slot), pairs);
	slot->nr_sections = 2;
	if (knows_devices) {
		slot->length += write_devices(devices_of(slot));
		slot->nr_sections++;
	}
	__atomic_store_n(&slot->generation, generation(), __ATOMIC_SEQ_CST);
	__atomic_store_n(&header->published, generation(), __ATOMIC_SEQ_CST);
}

static void ring(void)
{
	eventfd_write(guest_fds[VNUMA_IVSHMEM_PUBLISH_VECTOR], 1);
}

static void drain(void)
{
	eventfd_t value;
	int i;

	for (i = 0; i < VNUMA_IVSHMEM_VECTORS; i++)
		eventfd_read(host_fds[i], &value);
}

static struct vnuma_tc_guest *guest_area(void)
{
	return (void *)(memory + VNUMA_TC_GUEST_OFFSET);
}

static uint64_t load(const __u64 *field)
{
	return __atomic_load_n(field, __ATOMIC_ACQUIRE);
}

/* The guest signals each change of its area, not only acknowledgements. */
static bool await_signals(int timeout_ms)
{
	struct pollfd wait = {
		.fd = host_fds[VNUMA_IVSHMEM_ACKNOWLEDGE_VECTOR],
		.events = POLLIN,
	};
	uint64_t end = now_us() + timeout_ms * 1000ULL, now;
	eventfd_t value;

	while ((now = now_us()) < end &&
	       poll(&wait, 1, (end - now + 999) / 1000) == 1) {
		eventfd_read(wait.fd, &value);
		if (load(&guest_area()->acknowledged) == generation())
			return true;
	}
	return false;
}

static void await_acknowledgement(uint64_t start, int timeout_ms)
{
	if (await_signals(timeout_ms))
		printf("acknowledged %016llx %s %llu\n",
		       (unsigned long long)generation(),
		       guest_area()->mode == VNUMA_TC_MODE_FAST ? "fast" : "safe",
		       (unsigned long long)(now_us() - start));
	else
		printf("silent %016llx\n", (unsigned long long)generation());
}

static void ring_and_await(int timeout_ms)
{
	uint64_t start;

	drain();
	start = now_us();
	ring();
	await_acknowledgement(start, timeout_ms);
}

static void poke(const char *arguments)
{
	unsigned long long value;
	unsigned int offset, bytes;

	if (sscanf(arguments, "%i %u %lli", (int *)&offset, &bytes,
		   (long long *)&value) != 3 ||
	    bytes > sizeof(value) || offset > VNUMA_TC_REGION_SIZE - bytes) {
		printf("bad poke\n");
		return;
	}
	memcpy(memory + offset, &value, bytes);
	printf("ok\n");
}

static void set_distance(const char *arguments)
{
	unsigned int from, to, value;

	if (sscanf(arguments, "%u %u %u", &from, &to, &value) != 3 ||
	    from >= VNUMA_TC_MAX_NODES || to >= VNUMA_TC_MAX_NODES) {
		printf("bad distance\n");
		return;
	}
	distance[from][to] = value;
	printf("ok\n");
}

static void set_order(char *list)
{
	unsigned int node, domain;
	int used;

	for (; sscanf(list, "%u %u%n", &node, &domain, &used) == 2; list += used) {
		if (node >= VNUMA_TC_MAX_NODES || domain >= VNUMA_TC_MAX_NODES)
			break;
		domains[node] = domain;
	}
	printf("%s\n", list[strspn(list, " \n")] ? "bad order" : "ok");
}

static void set_devices(char *list)
{
	char *one, *state = NULL;
	uint32_t n = 0;

	for (one = strtok_r(list, ",\n", &state); one;
	     one = strtok_r(NULL, ",\n", &state)) {
		unsigned int segment, bus, device, function, node;

		if (n == VNUMA_TC_MAX_DEVICES ||
		    sscanf(one, "%x:%x:%x.%x=%u", &segment, &bus, &device,
			   &function, &node) != 5)
			break;
		devices[n++] = (struct vnuma_tc_device){
			.segment = segment, .bus = bus,
			.devfn = device << 3 | function, .node = domain_of(node),
		};
	}
	nr_devices = n;
	knows_devices = true;
	printf("%s\n", one ? "bad devices" : "ok");
}

static void execute(char *line)
{
	static int timeout_ms = ACK_TIMEOUT_MS;

	if (!strncmp(line, "publish ", 8)) {
		write_slot(line + 8);
		ring_and_await(timeout_ms);
	} else if (!strncmp(line, "write ", 6)) {
		write_slot(line + 6);
		printf("written %016llx\n", (unsigned long long)generation());
	} else if (!strncmp(line, "timeout ", 8)) {
		timeout_ms = atoi(line + 8);
		printf("ok\n");
	} else if (!strncmp(line, "nodes ", 6)) {
		nr_nodes = atoi(line + 6);
		printf("ok\n");
	} else if (!strncmp(line, "order ", 6)) {
		set_order(line + 6);
	} else if (!strncmp(line, "distance ", 9)) {
		set_distance(line + 9);
	} else if (!strncmp(line, "devices", 7)) {
		set_devices(line + 7 + (line[7] == ' '));
	} else if (!strcmp(line, "no-devices\n")) {
		knows_devices = false;
		printf("ok\n");
	} else if (!strncmp(line, "qmp ", 4)) {
		qmp_command(line + 4);
	} else if (!strcmp(line, "changes\n")) {
		printf("changes %llu\n",
		       (unsigned long long)load(&guest_area()->device_changes));
	} else if (!strcmp(line, "ring\n")) {
		ring();
		printf("ok\n");
	} else if (!strcmp(line, "ring-await\n")) {
		ring_and_await(timeout_ms);
	} else if (!strcmp(line, "await\n")) {
		await_acknowledgement(now_us(), timeout_ms);
	} else if (!strncmp(line, "poke ", 5)) {
		poke(line + 5);
	} else if (!strcmp(line, "slot\n")) {
		printf("%#lx %#lx %#lx\n",
		       (long)((uint8_t *)slot_of(counter) - memory),
		       (long)((uint8_t *)vcpus_of(slot_of(counter)) - memory),
		       (long)((uint8_t *)devices_of(slot_of(counter)) - memory));
	} else if (!strcmp(line, "refused\n")) {
		printf("refused %016llx %lld\n",
		       (unsigned long long)load(&guest_area()->refused),
		       (long long)guest_area()->refused_error);
	} else {
		printf("unknown command %s", line);
	}
}

int main(int argc, char **argv)
{
	const char *listen_path = NULL, *bus = NULL;
	static char line[1 << 17];
	int i, listener, status;
	pid_t plugger = 0;

	for (i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--listen"))
			listen_path = argv[i + 1];
		else if (!strcmp(argv[i], "--qmp"))
			qmp_path = argv[i + 1];
		else if (!strcmp(argv[i], "--bus"))
			bus = argv[i + 1];
	}
	if (!listen_path || !qmp_path != !bus) {
		fprintf(stderr,
			"usage: vnuma-fake-host [--qmp SOCKET --bus ID] --listen SOCKET\n");
		return 2;
	}
	/* As vnumad's: no other run has it. */
	epoch = time(NULL);
	init_memory();
	for (i = 0; i < VNUMA_IVSHMEM_VECTORS; i++) {
		host_fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
		guest_fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	}
	listener = listen_on(listen_path);
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (qmp_path) {
		plugger = fork();
		if (!plugger) {
			plug_device(bus, listen_path);
			_exit(0);
		}
	}
	peer = accept(listener, NULL, NULL);
	if (peer < 0)
		die("accept");
	greet_peer();
	/* QEMU answers device_add after it has read all of the greeting. */
	if (plugger > 0 && (waitpid(plugger, &status, 0) < 0 || status))
		return 1;
	printf("attached\n");
	while (fgets(line, sizeof(line), stdin) && strcmp(line, "quit\n"))
		execute(line);
	return 0;
}
