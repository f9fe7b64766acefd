// SPDX-License-Identifier: Apache-2.0

/** Allocates and drops for ever, so that eden fills where its one thread is. */
public class Churn {
	static volatile Object sink;

	public static void main(String[] arguments) {
		for (;;) {
			sink = new byte[1000];
		}
	}
}
