// SPDX-License-Identifier: Apache-2.0
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.zip.Deflater;

/**
 * For a test of HotSpot's G1: some threads keep the collector from running for moments, as zlib has arrays at fixed places, and others
 * need memory then. Each looks at what it has kept.
 *
 *     java Critical THREADS SECONDS
 */
public final class Critical {
    private static final int KEPT = 500;
    private static volatile Object sink;

    private static void run(int id, long end) {
        byte[] input = new byte[1 << 16], output = new byte[1 << 17];
        List<byte[]> kept = new ArrayList<>();
        for (int count = 0; System.nanoTime() < end; count++) {
            try {
                if (id % 2 == 0 && count % 200 == 0) {
                    Deflater deflater = new Deflater(1);
                    deflater.setInput(input);
                    deflater.finish();
                    while (!deflater.finished())
                        deflater.deflate(output);
                    deflater.end();
                }
                byte[] fresh = new byte[1000 + count % 3000];
                fresh[fresh.length - 1] = (byte) id;
                sink = fresh;
                if (count % 50 == 0)
                    kept.add(fresh);
                if (kept.size() < KEPT)
                    continue;
                for (byte[] one : kept)
                    if (one[one.length - 1] != (byte) id)
                        throw new IllegalStateException("thread " + id + " has " + Arrays.toString(one));
            } catch (OutOfMemoryError e) {
                // The heap is small, and collections have to wait.
            }
            kept.clear();
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        long end = System.nanoTime() + Long.parseLong(arguments[1]) * 1_000_000_000L;
        List<Thread> threads = new ArrayList<>();
        for (int i = 0; i < Integer.parseInt(arguments[0]); i++) {
            int id = i;
            Thread thread = new Thread(() -> run(id, end));
            thread.setUncaughtExceptionHandler((of, problem) -> {
                problem.printStackTrace();
                Runtime.getRuntime().halt(1);
            });
            threads.add(thread);
            thread.start();
        }
        for (Thread thread : threads)
            thread.join();
    }
}
