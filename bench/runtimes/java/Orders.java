// SPDX-License-Identifier: Apache-2.0

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;

/**
 * Makes orders and forgets them, with a thread for each CPU, as its standard input says. What lines it understands stands in
 * bench/runtimes/src/guest.rs.
 */
public class Orders {
	/** Orders that a thread remembers. */
	static final int SLOTS = 256;
	/** Lines of an order, and words of each: 4 KiB. */
	static final int LINES = 8;
	static final int WORDS = 62;
	/** Orders between two looks whether to wait. */
	static final int BATCH = 16;

	static final Object gate = new Object();
	static volatile boolean closed = true;
	static int waiting;
	static long operations;

	static final class Order {
		final long[][] lines = new long[LINES][];

		Order(long number) {
			for (int i = 0; i < LINES; i++) {
				long[] line = new long[WORDS];
				line[0] = number + i;
				lines[i] = line;
			}
		}
	}

	static final class Worker extends Thread {
		final Order[] remembered = new Order[SLOTS];
		long number;
		long sum;

		void order() {
			Order old = remembered[(int) (number % SLOTS)];
			if (old != null) {
				sum += old.lines[(int) (number % LINES)][0];
			}
			remembered[(int) (number % SLOTS)] = new Order(number);
			number++;
		}

		void batch() {
			for (int i = 0; i < BATCH; i++) {
				order();
			}
		}

		@Override
		public void run() {
			long last = 0;
			try {
				for (;;) {
					if (closed) {
						stay(number - last);
						last = number;
					}
					batch();
				}
			} catch (InterruptedException e) {
				throw new AssertionError(e);
			}
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

	public static void main(String[] arguments) throws IOException, InterruptedException {
		int threads = Integer.parseInt(arguments[0]);
		BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
		for (int i = 0; i < threads; i++) {
			Worker worker = new Worker();
			worker.setDaemon(true);
			worker.start();
		}
		System.out.println(close(threads));
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
