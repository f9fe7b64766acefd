// SPDX-License-Identifier: Apache-2.0

/** Allocates and drops for ever, so that eden fills where its one thread is, which the kernel knows by its name. */
public class Churn {
	static volatile Object sink;

	public static void main(String[] arguments) {
		new Thread(Churn::churn, "churn").start();
	}

	static void churn() {
		for (;;) {
			sink = new byte[1000];
		}
	}
}
