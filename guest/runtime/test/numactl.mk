# SPDX-License-Identifier: Apache-2.0
#
# Builds the programs of numactl's own tests, which its scripts expect beside them, with its header and the libnuma of this machine:
#
#	make -f test/numactl.mk SOURCE=DIR BUILD=DIR	(SOURCE: the unpacked source of numactl)
CC ?= gcc
CFLAGS := -O2 -w -D_GNU_SOURCE -I$(SOURCE)
SCRIPTS := bind_range checkaffinity checktopology numademo printcpu regress
PROGRAMS := distance move_pages nodemap pagesize tbitmap

# Debian's package does not have it.
DEMO := $(addprefix $(SOURCE)/,numademo.c stream_lib.c mt.c clearcache.c util.c)

all: $(SCRIPTS:%=$(BUILD)/test/%) $(PROGRAMS:%=$(BUILD)/test/%) $(BUILD)/numademo

$(BUILD)/test/tbitmap: $(SOURCE)/util.c

$(PROGRAMS:%=$(BUILD)/test/%): $(BUILD)/test/%: $(SOURCE)/test/%.c
	mkdir -p $(@D)
	$(CC) $(CFLAGS) -o $@ $(filter %.c,$^) -l:libnuma.so.1

$(BUILD)/numademo: $(DEMO)
	mkdir -p $(@D)
	$(CC) $(CFLAGS) -DHAVE_STREAM_LIB -DHAVE_MT -DHAVE_CLEAR_CACHE -o $@ $^ -l:libnuma.so.1 -lm

$(SCRIPTS:%=$(BUILD)/test/%): $(BUILD)/test/%: $(SOURCE)/test/%
	install -D -m 755 $< $@

.PHONY: all
.DELETE_ON_ERROR:
