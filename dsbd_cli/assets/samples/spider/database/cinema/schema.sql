-- Cinemas and their films: written for this project.
CREATE TABLE director (director_id INTEGER PRIMARY KEY, name TEXT, country TEXT);
CREATE TABLE film (film_id INTEGER PRIMARY KEY, title TEXT, director_id INTEGER, genre TEXT, minutes INTEGER, rating REAL,
  FOREIGN KEY (director_id) REFERENCES director(director_id));
CREATE TABLE hall (hall_id INTEGER PRIMARY KEY, name TEXT, seats INTEGER);
CREATE TABLE screening (screening_id INTEGER PRIMARY KEY, film_id INTEGER, hall_id INTEGER, day TEXT, tickets INTEGER, price REAL,
  FOREIGN KEY (film_id) REFERENCES film(film_id), FOREIGN KEY (hall_id) REFERENCES hall(hall_id));
INSERT INTO director VALUES (1,'Lena Bauer','Germany'),(2,'Kofi Mensah','Ghana'),(3,'Rosa Campos','Spain'),
  (4,'Hugh Farrow','Ireland'),(5,'Mei Tan','Singapore');
INSERT INTO film VALUES
  (1,'The Long Ferry',1,'drama',121,7.8),(2,'Copper Sky',2,'western',98,6.4),(3,'Laughing Water',3,'comedy',92,7.1),
  (4,'The Tenth Key',3,'thriller',134,8.2),(5,'Under the Lamp',4,'drama',108,6.9),(6,'Wild Geese',4,'comedy',92,NULL),
  (7,'Glass Hours',1,'drama',145,8.2),(8,'Salt and Smoke',2,'thriller',110,7.1),(9,'Tin Parade',5,'animation',84,7.5);
INSERT INTO hall VALUES (1,'Blue Hall',180),(2,'Red Hall',120),(3,'Attic',45),(4,'Garden',300);
INSERT INTO screening VALUES
  (1,1,1,'2024-03-01',150,9.5),(2,1,2,'2024-03-02',90,9.5),(3,2,3,'2024-03-01',40,7.0),(4,3,1,'2024-03-03',175,8.0),
  (5,4,1,'2024-03-05',180,11.0),(6,4,2,'2024-03-05',118,11.0),(7,5,3,'2024-03-06',22,7.0),(8,7,2,'2024-03-07',64,9.5),
  (9,8,2,'2024-03-08',77,8.0),(10,9,1,'2024-03-09',160,6.5),(11,9,3,'2024-03-10',45,6.5),(12,3,2,'2024-03-10',101,8.0);
