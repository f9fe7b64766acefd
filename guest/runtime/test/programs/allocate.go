// SPDX-License-Identifier: Apache-2.0

// For tests in a guest: memory of Go's heap. See README.md.
package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"unsafe"
)

var (
	kept  [][]byte
	again []byte
)

// The main goroutine stays on the main thread, whose id is the process's.
func init() {
	runtime.LockOSThread()
}

func take(size int) []byte {
	memory := make([]byte, size)
	for i := 0; i < size; i += 4096 {
		memory[i] = 1
	}
	fmt.Printf("%#x %d\n", uintptr(unsafe.Pointer(&memory[0])), size)
	return memory
}

func main() {
	fmt.Println(os.Getpid(), runtime.Version())
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		switch lines.Text() {
		case "new":
			kept = append(kept, take(16<<20))
		case "again":
			again = nil
			runtime.GC()
			again = take(4 << 20)
		default:
			os.Exit(1)
		}
	}
}
