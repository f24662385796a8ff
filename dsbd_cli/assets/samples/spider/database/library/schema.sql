-- A town library: written for this project.
CREATE TABLE author (author_id INTEGER PRIMARY KEY, name TEXT, country TEXT, birth_year INTEGER);
CREATE TABLE book (book_id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER, year INTEGER, pages INTEGER, copies INTEGER,
  FOREIGN KEY (author_id) REFERENCES author(author_id));
CREATE TABLE member (member_id INTEGER PRIMARY KEY, name TEXT, town TEXT, joined INTEGER);
CREATE TABLE loan (loan_id INTEGER PRIMARY KEY, book_id INTEGER, member_id INTEGER, day TEXT, days_kept INTEGER,
  FOREIGN KEY (book_id) REFERENCES book(book_id), FOREIGN KEY (member_id) REFERENCES member(member_id));
INSERT INTO author VALUES
  (1,'Marta Olsen','Norway',1931),(2,'Pierre Vidal','France',1948),(3,'Ines Duarte','Portugal',1975),
  (4,'Yusuf Demir','Turkey',1962),(5,'Clara Weiss','Germany',1948),(6,'Anne Moreau','France',NULL);
INSERT INTO book VALUES
  (1,'The Salt Road',1,1960,310,3),(2,'Winter Letters',1,1972,204,1),(3,'A House of Reeds',2,1985,412,2),
  (4,'The Quiet Engine',3,2009,288,4),(5,'Paper Boats',3,2014,156,2),(6,'Seven Bridges',4,1999,530,1),
  (7,'Night Market',4,2005,344,3),(8,'The Clockmaker',5,1978,267,2),(9,'Small Weather',5,1978,198,2),
  (10,'Harbour Songs',5,1991,350,NULL),(11,'Stone Orchard',2,1996,412,1);
INSERT INTO member VALUES
  (1,'Ben Hart','Alford',2015),(2,'Lucy Crane','Alford',2018),(3,'Omar Reyes','Denby',2019),
  (4,'Sofia Lind','Denby',2020),(5,'Grace Poole','Marsh End',2011),(6,'Tom Abbot',NULL,2021);
INSERT INTO loan VALUES
  (1,1,1,'2023-01-04',14),(2,4,1,'2023-02-11',21),(3,4,2,'2023-02-20',7),(4,7,3,'2023-03-02',30),
  (5,1,3,'2023-03-15',12),(6,5,3,'2023-04-01',9),(7,8,4,'2023-04-18',14),(8,6,1,'2023-05-05',45),
  (9,4,5,'2023-05-21',10),(10,3,2,'2023-06-02',NULL),(11,9,3,'2023-06-09',14);
