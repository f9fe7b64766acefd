// SPDX-License-Identifier: Apache-2.0

// For tests in a guest: memory of .NET's heap. See README.md.
using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;
using System.Text;

static unsafe class Allocate
{
    // Small enough for the youngest generation.
    const int Piece = 16 << 10;
    const int New = 1024, Again = 256;
    static readonly List<byte[]> Kept = new List<byte[]>();
    static byte[][] again;

    [DllImport("libc.so.6")]
    static extern int getpid();

    // What has been taken, as pieces that follow each other.
    static readonly StringBuilder Line = new StringBuilder();
    static long start, end;

    static void Finish()
    {
        if (end > start)
            Line.Append(Line.Length > 0 ? " 0x" : "0x").Append(start.ToString("x")).Append(' ').Append(end - start);
        start = end = 0;
    }

    static byte[] Take()
    {
        var memory = new byte[Piece];
        for (var i = 0; i < Piece; i += 4096)
            memory[i] = 1;
        fixed (byte* at = memory) {
            if ((long)at < end || (long)at - end > 4096) {
                Finish();
                start = (long)at;
            }
            end = (long)at + Piece;
        }
        return memory;
    }

    static string TakeNew()
    {
        Line.Clear();
        for (var i = 0; i < New; i++)
            Kept.Add(Take());
        Finish();
        return Line.ToString();
    }

    static string TakeAgain()
    {
        Line.Clear();
        again = null;
        GC.Collect();
        again = new byte[Again][];
        for (var i = 0; i < Again; i++)
            again[i] = Take();
        Finish();
        return Line.ToString();
    }

    static int Main()
    {
        Console.WriteLine(getpid() + " " + Environment.Version + (System.Runtime.GCSettings.IsServerGC ? " server" : " workstation"));
        for (string line; (line = Console.ReadLine()) != null;) {
            if (line == "new")
                Console.WriteLine(TakeNew());
            else if (line == "again")
                Console.WriteLine(TakeAgain());
            else
                return 1;
        }
        return 0;
    }
}
