// SPDX-License-Identifier: Apache-2.0

import java.io.IOException;
import java.nio.charset.StandardCharsets;

/**
 * A wholesaler as TPC-C and SPECjbb have it, in memory, with a warehouse for each CPU: stock and customers stay, orders and what is
 * printed of each transaction are soon forgotten. The mix of transactions is TPC-C's (clause 5.2.3).
 */
public class Warehouses extends Worker {
	/** Of a warehouse, as in TPC-C (clause 1.2.1), but for customers, of which TPC-C has three times as many. */
	static final int ITEMS = 100_000;
	static final int DISTRICTS = 10;
	static final int CUSTOMERS = 1_000;
	/** Characters that the stock of an item has for each district, of its own, and of a customer. */
	static final int INFO = 24;
	static final int DATA = 50;
	static final int HISTORY = 500;
	/** Orders that a district remembers. */
	static final int ORDERS = 64;
	/** Characters of a screen. */
	static final int SCREEN = 24 * 80;
	/** Percent of the transactions, in the order of {@link #operation}; the rest are looks at the stock. */
	static final int NEW_ORDERS = 45;
	static final int PAYMENTS = 43;
	static final int STATUSES = 4;
	static final int DELIVERIES = 4;

	static final class Stock {
		final int item;
		final byte[] infos = new byte[DISTRICTS * INFO];
		final String data;
		int quantity = 100;
		int sold;

		Stock(int item) {
			this.item = item;
			java.util.Arrays.fill(infos, (byte) ('a' + item % 26));
			data = new String(infos, 0, DATA, StandardCharsets.ISO_8859_1);
		}
	}

	static final class Customer {
		final String name;
		final byte[] history = new byte[HISTORY];
		long balance;
		int payments;

		Customer(int number) {
			name = "customer " + number;
		}
	}

	static final class Line {
		final Stock stock;
		final int quantity;
		final long amount;
		final String info;

		Line(Stock stock, int quantity, int district) {
			this.stock = stock;
			this.quantity = quantity;
			amount = (long) quantity * (stock.item % 100 + 1);
			info = new String(stock.infos, district * INFO, INFO, StandardCharsets.ISO_8859_1);
		}
	}

	static final class Order {
		final long number;
		final Customer customer;
		final Line[] lines;
		boolean delivered;

		Order(long number, Customer customer, int lines) {
			this.number = number;
			this.customer = customer;
			this.lines = new Line[lines];
		}

		long amount() {
			long amount = 0;
			for (Line line : lines) {
				amount += line.amount;
			}
			return amount;
		}
	}

	static final class District {
		final Customer[] customers = new Customer[CUSTOMERS];
		final Order[] orders = new Order[ORDERS];
		long next;
		long undelivered;
		long sold;
	}

	final Stock[] stock = new Stock[ITEMS];
	final District[] districts = new District[DISTRICTS];
	/** State of the random numbers (xorshift). */
	long random = 0x9e37_79b9_7f4a_7c15L;
	/** What was printed last. */
	String screen;

	int random(int below) {
		random ^= random << 13;
		random ^= random >>> 7;
		random ^= random << 17;
		return (int) ((random >>> 33) % below);
	}

	@Override
	void prepare() {
		for (int i = 0; i < ITEMS; i++) {
			stock[i] = new Stock(i);
		}
		for (int i = 0; i < DISTRICTS; i++) {
			districts[i] = new District();
			for (int j = 0; j < CUSTOMERS; j++) {
				districts[i].customers[j] = new Customer(j);
			}
		}
	}

	@Override
	void operation() {
		int kind = random(100);
		int at = random(DISTRICTS);
		District district = districts[at];
		StringBuilder page = new StringBuilder(SCREEN);
		if ((kind -= NEW_ORDERS) < 0) {
			newOrder(district, at, page);
		} else if ((kind -= PAYMENTS) < 0) {
			payment(district, page);
		} else if ((kind -= STATUSES) < 0) {
			status(district, page);
		} else if ((kind -= DELIVERIES) < 0) {
			delivery(page);
		} else {
			stockLevel(district, page);
		}
		while (page.length() < SCREEN) {
			page.append("                    ");
		}
		screen = page.toString();
	}

	void newOrder(District district, int at, StringBuilder page) {
		Customer customer = district.customers[random(CUSTOMERS)];
		Order order = new Order(district.next, customer, 5 + random(11));
		for (int i = 0; i < order.lines.length; i++) {
			Stock item = stock[random(ITEMS)];
			Line line = new Line(item, 1 + random(10), at);
			item.quantity -= line.quantity;
			if (item.quantity < 10) {
				item.quantity += 91;
			}
			item.sold += line.quantity;
			order.lines[i] = line;
			page.append(item.item).append(' ').append(line.info).append(' ').append(line.amount).append('\n');
		}
		district.orders[(int) (district.next % ORDERS)] = order;
		district.next++;
		page.append(customer.name).append(' ').append(order.amount());
	}

	void payment(District district, StringBuilder page) {
		Customer customer = district.customers[random(CUSTOMERS)];
		int amount = 1 + random(5000);
		customer.balance -= amount;
		customer.payments++;
		customer.history[customer.payments % HISTORY] = (byte) amount;
		district.sold += amount;
		page.append(customer.name).append(' ').append(customer.balance).append(' ').append(district.sold);
	}

	/** Of an order that the district remembers, and of its customer. */
	void status(District district, StringBuilder page) {
		Order order = district.orders[random(ORDERS)];
		if (order != null) {
			page.append(order.customer.name).append(' ').append(order.customer.balance).append('\n');
			for (Line line : order.lines) {
				page.append(line.stock.item).append(' ').append(line.quantity).append(' ').append(line.amount).append('\n');
			}
		}
	}

	/** The oldest order of each district that is not delivered and not forgotten. */
	void delivery(StringBuilder page) {
		for (District district : districts) {
			district.undelivered = Math.max(district.undelivered, district.next - ORDERS);
			if (district.undelivered < district.next) {
				Order order = district.orders[(int) (district.undelivered++ % ORDERS)];
				order.delivered = true;
				order.customer.balance += order.amount();
				page.append(order.number).append(' ').append(order.customer.balance).append('\n');
			}
		}
	}

	/** Items of the last 20 orders of a district of which little is left. */
	void stockLevel(District district, StringBuilder page) {
		int low = 0;
		for (long number = Math.max(0, district.next - 20); number < district.next; number++) {
			for (Line line : district.orders[(int) (number % ORDERS)].lines) {
				low += line.stock.quantity < 15 ? 1 : 0;
			}
		}
		page.append(low);
	}

	public static void main(String[] arguments) throws IOException, InterruptedException {
		// What stays is old from the beginning.
		serve(Integer.parseInt(arguments[0]), Warehouses::new, System::gc);
	}
}
