// SPDX-License-Identifier: Apache-2.0

import java.io.IOException;

/** Makes orders and forgets them, with a thread for each CPU. */
public class Orders extends Worker {
	/** Orders that a thread remembers. */
	static final int SLOTS = 256;
	/** Lines of an order, and words of each: 4 KiB. */
	static final int LINES = 8;
	static final int WORDS = 62;

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

	final Order[] remembered = new Order[SLOTS];
	long number;
	long sum;

	@Override
	void operation() {
		Order old = remembered[(int) (number % SLOTS)];
		if (old != null) {
			sum += old.lines[(int) (number % LINES)][0];
		}
		remembered[(int) (number % SLOTS)] = new Order(number);
		number++;
	}

	public static void main(String[] arguments) throws IOException, InterruptedException {
		serve(Integer.parseInt(arguments[0]), Orders::new, () -> { });
	}
}
