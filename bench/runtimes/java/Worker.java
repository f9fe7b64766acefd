// SPDX-License-Identifier: Apache-2.0

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.util.function.Supplier;

/**
 * A thread of a load. All of them do what the standard input says; what lines it understands stands in bench/runtimes/src/guest.rs.
 */
abstract class Worker extends Thread {
	/** Operations between two looks whether to wait. */
	static final int BATCH = 16;

	static final Object gate = new Object();
	static volatile boolean closed = true;
	static int waiting;
	static long operations;

	/** Makes what stays, before the first operation. */
	void prepare() {
	}

	abstract void operation();

	void batch() {
		for (int i = 0; i < BATCH; i++) {
			operation();
		}
	}

	@Override
	public void run() {
		prepare();
		long done = 0;
		try {
			for (;;) {
				if (closed) {
					stay(done);
					done = 0;
				}
				batch();
				done += BATCH;
			}
		} catch (InterruptedException e) {
			throw new AssertionError(e);
		}
	}

	static void stay(long done) throws InterruptedException {
		synchronized (gate) {
			waiting++;
			operations += done;
			gate.notifyAll();
			while (closed) {
				gate.wait();
			}
			waiting--;
		}
	}

	/** Closes the gate, and waits for all threads. */
	static long close(int threads) throws InterruptedException {
		synchronized (gate) {
			closed = true;
			while (waiting < threads) {
				gate.wait();
			}
			return operations;
		}
	}

	static void open() {
		synchronized (gate) {
			closed = false;
			gate.notifyAll();
		}
	}

	/** Serves the standard input with so many workers. `prepared` runs when all have made what stays. */
	static void serve(int threads, Supplier<Worker> workers, Runnable prepared) throws IOException, InterruptedException {
		BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
		for (int i = 0; i < threads; i++) {
			Worker worker = workers.get();
			worker.setDaemon(true);
			worker.start();
		}
		long none = close(threads);
		prepared.run();
		System.out.println(none);
		for (String line = input.readLine(); line != null; line = input.readLine()) {
			switch (line) {
			case "go":
				open();
				System.out.println(0);
				break;
			case "pause":
				System.out.println(close(threads));
				break;
			default:
				throw new IOException(line + ": what is that?");
			}
		}
	}
}
